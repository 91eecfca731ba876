"""Benchmarks of the trainer; TensorFlow is loaded by the processes of their cases."""
