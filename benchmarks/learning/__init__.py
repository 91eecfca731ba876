"""Benchmarks of the trainer. Only the processes that measure cases load TensorFlow."""
