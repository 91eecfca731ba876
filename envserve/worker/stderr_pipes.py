"""Forward the stderr of all workers, and keep the last 4 KiB of each for error reports.

Output is forwarded in whole lines, and a Python stack as one piece, so that the output
of several workers does not mix. The stack of a crashed worker is withheld, because the
report of its exit contains the stack.

A slow reader of the template's stderr (a terminal paused with Ctrl-S, for example) does
not block workers: their pipes are always read, and output that exceeds the buffer is
dropped. Output that exceeds a rate limit is also dropped, so that a log file does not
fill the disk.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import stat
from collections.abc import Callable
from typing import Final

from envserve.worker import unpatched

#: Number of bytes to keep from the end of each worker's output.
TAIL_BYTES: Final = 4096
_READ_BYTES: Final = 1 << 16
#: First bytes of a Python stack. `faulthandler` writes a stack in small parts, so
#: output that begins with these bytes is buffered.
_STACK_STARTS: Final = (b"Fatal Python error: ", b"Stack (most recent call first):")
_MAX_BUFFER_BYTES: Final = 1 << 14
#: Maximum size of the output buffered for a slow reader of the template's stderr.
_MAX_UNSENT_BYTES: Final = 1 << 20
#: Limits on forwarded output: size of a burst, and bytes per second on average. If a
#: limit is exceeded, output is dropped for at least `_DROP_SECONDS`.
_MAX_BURST_BYTES: Final = 8 << 20
_BYTES_PER_SECOND: Final = 1 << 14
_DROP_SECONDS: Final = 1.0
#: Maximum number of reads of a worker's pipe after the worker has exited. Its children
#: may keep writing to the pipe, so the end of file may never come.
_MAX_LAST_READS: Final = 64
#: Maximum time to forward the remaining output when the template exits.
_LAST_FLUSH_MS: Final = 200


class StderrPipes:
    """The stderr pipes of all workers.

    The template's loop polls them, and calls `handle` for each ready descriptor.
    """

    def __init__(
        self,
        poller: select.poll,
        stderr_fd: int = 2,
        clock: Callable[[], float] = unpatched.monotonic,
    ) -> None:
        """Store the poll object to register with, and the descriptor to forward to."""
        self._poller = poller
        # Maps the read end of each pipe to its worker; to -1 after the worker's exit.
        self._workers: dict[int, int] = {}
        self._tails: dict[int, bytearray] = {}  # last output of each worker
        # Maps each read end to its output that is not forwarded yet.
        self._buffers: dict[int, bytearray] = {}
        self._stacks: dict[int, bytes] = {}  # withheld stack of each worker
        self._unsent = bytearray()
        self._num_dropped = 0
        self._clock = clock
        self._budget, self._budget_at = float(_MAX_BURST_BYTES), clock()
        self._drops_until = -math.inf
        self._out_fd = _open_nonblocking(stderr_fd)

    def open(self, worker: int) -> int | None:
        """Return the write end of a worker's new pipe; None if no descriptors are left.

        The caller closes the descriptor once the worker has inherited it.
        """
        try:
            read_fd, write_fd = os.pipe()
        except OSError:
            return None
        os.set_blocking(read_fd, False)
        self._workers[read_fd] = worker
        self._buffers[read_fd] = bytearray()
        self._tails[worker] = bytearray()
        self._poller.register(read_fd, select.POLLIN)
        return write_fd

    def close_in_worker(self) -> None:
        """Close the template's descriptors in a forked worker.

        If workers held each other's read ends, their writes could block after the
        template has exited.
        """
        for read_fd in self._workers:
            os.close(read_fd)
        if self._out_fd > 2:
            os.close(self._out_fd)

    def worker_of(self, fd: int) -> int | None:
        """Return the worker of a pipe; None for any other descriptor."""
        return self._workers.get(fd)

    def handle(self, fd: int) -> bool:
        """Read or write a ready descriptor; return False if it is unknown."""
        if fd in self._workers:
            self._read(fd)
        elif fd == self._out_fd:
            self._flush()
        else:
            return False
        return True

    def finish(self, worker: int, *, is_reported: bool = False) -> bytes:
        """Return the end of a worker's output, once the worker has exited.

        Output of processes that the worker has left behind is still forwarded.

        Args:
          worker: Number of the worker, as passed to `open`.
          is_reported: Whether the caller reports the returned output. If so, a stack in
            the output is not forwarded.
        """
        for read_fd in [fd for fd, owner in self._workers.items() if owner == worker]:
            for _ in range(_MAX_LAST_READS):
                if not self._read(read_fd):
                    break
            if read_fd in self._workers:
                self._workers[read_fd] = -1
                self._withhold_stack(worker, self._buffers[read_fd])
                self._forward_complete(read_fd)
        stack = self._stacks.pop(worker, b"")
        if stack and not is_reported:
            self._forward(stack)
        return bytes(self._tails.pop(worker, b""))

    def close(self) -> None:
        """Forward the remaining output when the template exits."""
        for read_fd in list(self._workers):
            self._read(read_fd)
            if read_fd in self._buffers:
                self._forward_complete(read_fd, is_at_eof=True)
        for stack in self._stacks.values():
            self._forward(stack)
        poller = unpatched.poll()
        poller.register(self._out_fd, select.POLLOUT)
        deadline = unpatched.monotonic() + _LAST_FLUSH_MS / 1000
        while self._unsent and poller.poll(_LAST_FLUSH_MS):
            self._flush()
            if unpatched.monotonic() >= deadline:  # the reader is too slow
                return

    def _read(self, read_fd: int) -> bool:
        """Read a pipe once; return whether there was any output."""
        try:
            data = unpatched.read(read_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        worker = self._workers[read_fd]
        if not data:
            self._poller.unregister(read_fd)
            self._withhold_stack(worker, self._buffers[read_fd])
            self._forward_complete(read_fd, is_at_eof=True)
            del self._buffers[read_fd]
            del self._workers[read_fd]
            os.close(read_fd)
            return False
        if worker in self._tails:
            tail = self._tails[worker]
            tail += data[-TAIL_BYTES:]
            del tail[:-TAIL_BYTES]
        self._buffers[read_fd] += data
        self._forward_complete(read_fd)
        return True

    def _withhold_stack(self, worker: int, buffer: bytearray) -> None:
        if worker in self._tails and buffer.startswith(_STACK_STARTS):
            self._stacks[worker] = bytes(buffer)
            buffer.clear()

    def _forward_complete(self, read_fd: int, *, is_at_eof: bool = False) -> None:
        """Forward complete lines and stacks; at end of file, forward everything."""
        buffer = self._buffers[read_fd]
        stop = len(buffer)
        if not is_at_eof and stop <= _MAX_BUFFER_BYTES and self._workers[read_fd] >= 0:
            lines_end = 1 + max(buffer.rfind(b"\n"), buffer.rfind(b"\r"))
            stop = min(
                [lines_end, *(buffer.index(s) for s in _STACK_STARTS if s in buffer)]
            )
        if stop:
            self._forward(bytes(buffer[:stop]))
            del buffer[:stop]

    def _forward(self, data: bytes) -> None:
        now = self._clock()
        refill = (now - self._budget_at) * _BYTES_PER_SECOND
        self._budget = min(self._budget + refill, _MAX_BURST_BYTES)
        self._budget_at = now
        if len(data) > self._budget:
            self._drops_until = now + _DROP_SECONDS
        free = _MAX_UNSENT_BYTES - len(self._unsent)
        if len(data) > free or now < self._drops_until:
            self._num_dropped += len(data)
            return
        self._budget -= len(data)
        if self._num_dropped:
            note = f"[envserve: {self._num_dropped} bytes of worker output dropped]\n"
            self._unsent += note.encode()
            self._num_dropped = 0
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        """Write as much of the unsent output as possible without blocking."""
        poller = unpatched.poll()
        poller.register(self._out_fd, select.POLLOUT)
        try:
            # A writable pipe accepts PIPE_BUF bytes without blocking.
            while self._unsent and poller.poll(0):
                sent = unpatched.write(self._out_fd, self._unsent[: select.PIPE_BUF])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the reader has exited, or the disk is full
            self._unsent.clear()
        if self._unsent:
            self._poller.register(self._out_fd, select.POLLOUT)
        else:
            with contextlib.suppress(KeyError):
                self._poller.unregister(self._out_fd)


def _open_nonblocking(stderr_fd: int) -> int:
    """Return a descriptor for writing, which is non-blocking if the system permits it.

    The flags of the given descriptor must not be changed, because they also apply to
    the owner's descriptor. Therefore, the file is opened again.
    """
    try:
        if stat.S_ISREG(os.fstat(stderr_fd).st_mode):
            # A regular file does not block, and a new descriptor would have its own
            # position in the file.
            return stderr_fd
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_APPEND
        return os.open(f"/proc/self/fd/{stderr_fd}", flags)
    except OSError:  # the file cannot be opened again
        return stderr_fd
