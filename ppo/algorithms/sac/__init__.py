"""Soft actor-critic: train an agent on transitions from a replay buffer.

`sac` is the algorithm, and `replay` its replay buffer.
"""
