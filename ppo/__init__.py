"""Proximal policy optimisation in TensorFlow, on batches of envs from `envserve`.

Its modules are imported by name; the way from settings to a policy is `ppo.config`,
`ppo.agent`, `ppo.simulate`, `ppo.learning`, `ppo.train`. Importing this package loads
neither TensorFlow nor Gymnasium.
"""

__all__: list[str] = []
