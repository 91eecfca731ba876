"""Benchmarks of the trainer; only the processes that measure cases load TensorFlow."""
