"""Functions of the standard library, as they were before user modules were imported.

Some modules replace these functions when they are imported (gevent, eventlet). The
replacements run an event loop, which the template and workers do not have, or take away
the exits of workers. The template imports this module first.
"""

from os import fork, read, waitid, waitpid, write
from select import poll
from signal import signal
from socket import socket

__all__ = ["fork", "poll", "read", "signal", "socket", "waitid", "waitpid", "write"]
