"""Soft actor-critic: train an agent on transitions from a replay buffer.

`sac` is the algorithm, and `replay_buffer` its replay buffer.
"""
