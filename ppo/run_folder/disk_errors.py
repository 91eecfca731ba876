"""What TensorFlow raises when it cannot write, as what Python raises then."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

__all__ = ["disk_errors"]


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what TensorFlow raises when it cannot write there into an `OSError`."""
    try:
        yield
    except tf.errors.OpError as error:
        is_full = isinstance(error, tf.errors.ResourceExhaustedError)
        number = errno.ENOSPC if is_full else errno.EIO
        text = os.strerror(number) if is_full else error.message
        raise OSError(number, text, str(path)) from error
