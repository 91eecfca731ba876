"""Importing this module starts a thread, which forked processes do not have."""

from concurrent.futures import ThreadPoolExecutor

_POOL = ThreadPoolExecutor(1)
_POOL.submit(int).result()

#: The module whose import starts the thread.
MODULE = __name__


def wait_for_thread() -> None:
    """Wait for the thread; block forever in a process forked after the import."""
    _POOL.submit(int).result()
