"""Benchmark cases that do not load TensorFlow."""
