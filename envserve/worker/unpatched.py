"""Functions of the standard library, as they were before user modules were imported.

Some modules (gevent, eventlet) replace these functions when they are imported. The
replacements need an event loop, which the template and the workers do not run, or reap
workers before the template can. Therefore, the template imports this module before any
user module.
"""

from os import fork as fork
from os import read as read
from os import waitid as waitid
from os import waitpid as waitpid
from os import write as write
from select import poll as poll
from signal import signal as signal
from socket import socket as socket
