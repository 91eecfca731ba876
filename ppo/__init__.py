"""Proximal policy optimisation in TensorFlow, on batches of envs from `envserve`.

Import its modules by name. The path from settings to a trained policy is `ppo.config`,
`ppo.agent`, `ppo.simulate`, `ppo.learning`, `ppo.train`. Importing this package loads
neither TensorFlow nor Gymnasium.
"""
