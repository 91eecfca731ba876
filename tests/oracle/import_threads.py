"""Importing this module starts a thread, which later forks do not have."""

from concurrent.futures import ThreadPoolExecutor

_POOL = ThreadPoolExecutor(1)
_POOL.submit(int).result()

#: The module whose import starts the thread.
MODULE = __name__


def wait_for_thread() -> None:
    """Wait for the thread, forever if this process is a fork."""
    _POOL.submit(int).result()
