"""Functions of the standard library, as they were before user modules were imported.

Some modules replace these functions when they are imported (gevent, eventlet). The
replacements run an event loop, which the template and workers do not have, or take away
the exits of workers. The template imports this module first.
"""

from os import fork as fork
from os import read as read
from os import waitid as waitid
from os import waitpid as waitpid
from os import write as write
from select import poll as poll
from signal import signal as signal
from socket import socket as socket
