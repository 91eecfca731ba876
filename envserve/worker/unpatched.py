"""Functions of the standard library, as they were before user modules were imported.

Some modules (gevent, eventlet) replace these functions when they are imported. Some
replacements need an event loop, which neither the template nor the workers run; others
reap workers before the template can. Other modules (freezegun) stop or set the clocks,
so that no timeout of the template would expire. Therefore, the template imports this
module before any user module.
"""

from os import fork as fork
from os import read as read
from os import waitid as waitid
from os import waitpid as waitpid
from os import write as write
from select import poll as poll
from signal import signal as signal
from socket import socket as socket
from time import monotonic as monotonic
from time import monotonic_ns as monotonic_ns
from time import perf_counter as perf_counter
