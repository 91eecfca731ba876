"""The benchmarks of the trainer: simulate, overlap, profile, train, goal.

Importing this package, or a module of it, loads no TensorFlow: the processes of the
cases do.
"""

__all__: list[str] = []
