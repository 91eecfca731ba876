"""Proximal policy optimisation: train an agent for several epochs on each rollout.

`update` is the update of an iteration. `objective` selects the policy loss,
`schedules` adapts the coefficients between iterations, and `trust_region` limits how
far the policy moves.
"""
