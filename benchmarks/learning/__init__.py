"""Benchmarks of the trainer; only the processes of their cases load TensorFlow."""
