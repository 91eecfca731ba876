"""The trainer's sub-commands of `envserve bench`: simulate, overlap, profile, train.

Importing this package, or a module of it, loads no TensorFlow: the processes of the
cases do.
"""

__all__: list[str] = []
