"""Proximal policy optimisation: train an agent for several epochs on each rollout.

`update` trains the agent on the rollout of one iteration. `load_loss` loads the policy
loss, `schedules` adapts the coefficients between iterations, and `trust_region` limits
how far an iteration changes the policy.
"""
