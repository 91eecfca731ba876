"""PPO, SAC and your own algorithms in TensorFlow, on batches of envs from `envserve`.

Import the modules by name. To read the code from settings to a trained policy, start
with `ppo.config`, then read `ppo.agent`, `ppo.simulate`, `ppo.algorithms` and
`ppo.train`. Importing this package loads neither TensorFlow nor Gymnasium.
"""
