"""Functions of the standard library, as they were before user modules were imported.

Some modules (gevent, eventlet) replace these functions when they are imported. The
replacements need an event loop, which the template and the workers do not run, or reap
workers before the template can. Other modules (freezegun) stop or set the clocks, so
that no timeout of the template would expire. Therefore, the template imports this
module before any user module.

Freezegun replaces the clocks in all modules that contain them, including this one.
Therefore, this module contains them only inside of `partial` objects.
"""

import os
import time
from functools import partial
from os import fork as fork
from os import read as read
from os import waitpid as waitpid
from os import write as write
from select import poll as poll
from signal import signal as signal
from socket import socket as socket

#: None on macOS before Python 3.13, which does not have this function.
waitid = getattr(os, "waitid", None)
monotonic = partial(time.monotonic)
monotonic_ns = partial(time.monotonic_ns)
perf_counter = partial(time.perf_counter)
perf_counter_ns = partial(time.perf_counter_ns)
