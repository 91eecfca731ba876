"""Proximal policy optimisation in TensorFlow, on batches of envs from `envserve`.

Importing this package loads neither TensorFlow nor Gymnasium; its modules are imported
by name: `ppo.config`, `ppo.simulate`, `ppo.train`, `ppo.evaluate`.
"""

__all__: list[str] = []
