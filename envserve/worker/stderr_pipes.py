"""What workers write to stderr: passed on unchanged, and its end kept for reports.

Lines are whole. A stack comes in one piece, whoever else writes one meanwhile; that of
a worker that has crashed is left to the report of its end, so that it is seen once.
Reading never stops for a writer's sake, so a worker that writes a lot does not wait
for a terminal that is stopped: what does not fit into a buffer then is left out.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from typing import Final

__all__ = ["TAIL_BYTES", "StderrPipes"]

#: How much of the end of a worker's output is kept.
TAIL_BYTES: Final = 4096
_READ_BYTES: Final = 1 << 16
#: What a worker writes last, a word at a time: it is held until its end is there.
_STACKS: Final = (b"Fatal Python error: ", b"Stack (most recent call first):")
_MAX_HELD_BYTES: Final = 1 << 14
#: What waits for a reader of our own stderr that is slow.
_MAX_UNSENT_BYTES: Final = 1 << 20
#: Most that is read of a worker that has ended: who has inherited its pipe may go on.
_MAX_LAST_READS: Final = 64
#: How long the last output may take to leave when we end.
_LAST_FLUSH_MS: Final = 200


class StderrPipes:
    """A pipe per worker, all of them read by one process that has other things to do.

    The owner polls, and calls `handle` for each descriptor that is one of ours.
    """

    def __init__(self, poller: select.poll, stderr_fd: int = 2) -> None:
        """Takes the poll object to register with, and where to pass on to."""
        self._poller = poller
        self._workers: dict[int, int] = {}  # by read end; -1 once it has ended
        self._tails: dict[int, bytearray] = {}  # by worker
        self._held: dict[int, bytearray] = {}  # by read end
        self._stacks: dict[int, bytes] = {}  # by worker, of those that have ended
        self._unsent = bytearray()
        self._num_dropped = 0
        self._out_fd = _writable(stderr_fd)

    def open(self, worker: int) -> int | None:
        """Returns the end to write to for a worker, or None for lack of descriptors.

        The caller closes it once the worker has it.
        """
        try:
            read_fd, write_fd = os.pipe()
        except OSError:
            return None
        os.set_blocking(read_fd, False)
        self._workers[read_fd] = worker
        self._held[read_fd] = bytearray()
        self._tails[worker] = bytearray()
        self._poller.register(read_fd, select.POLLIN)
        return write_fd

    def forget(self) -> None:
        """Closes what is ours, in a worker: else the others' writes could block."""
        for read_fd in self._workers:
            os.close(read_fd)
        if self._out_fd > 2:
            os.close(self._out_fd)

    def worker_of(self, fd: int) -> int | None:
        """Returns whose pipe it is; None if it is none."""
        return self._workers.get(fd)

    def handle(self, fd: int) -> bool:
        """Reads, or writes, what there is now; False if the descriptor is not ours."""
        if fd in self._workers:
            self._read(fd)
        elif fd == self._out_fd:
            self._flush()
        else:
            return False
        return True

    def end(self, worker: int, *, is_reported: bool = False) -> bytes:
        """Returns the end of what a worker has written that is no more.

        A process that it has left behind may still write; that is passed on as well.
        A stack at its end is not passed on if the caller reports it (`is_reported`).
        """
        for read_fd in [fd for fd, owner in self._workers.items() if owner == worker]:
            for _ in range(_MAX_LAST_READS):
                if not self._read(read_fd):
                    break
            if read_fd in self._workers:
                self._workers[read_fd] = -1
                self._keep_stack(worker, self._held[read_fd])
                self._let_go(read_fd)
        stack = self._stacks.pop(worker, b"")
        if stack and not is_reported:
            self._pass_on(stack)
        return bytes(self._tails.pop(worker, b""))

    def close(self) -> None:
        """Passes on what has come so far."""
        for read_fd in list(self._workers):
            self._read(read_fd)
            if read_fd in self._held:
                self._let_go(read_fd, is_over=True)
        for stack in self._stacks.values():
            self._pass_on(stack)
        last = select.poll()
        last.register(self._out_fd, select.POLLOUT)
        give_up_at = time.monotonic() + _LAST_FLUSH_MS / 1000
        while self._unsent and last.poll(_LAST_FLUSH_MS):
            self._flush()
            if time.monotonic() >= give_up_at:  # a reader that is slow, but reads on
                return

    def _read(self, read_fd: int) -> bool:
        """Reads once; False if there was nothing, or the pipe is at its end."""
        try:
            data = os.read(read_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        worker = self._workers[read_fd]
        if not data:
            self._poller.unregister(read_fd)
            self._keep_stack(worker, self._held[read_fd])
            self._let_go(read_fd, is_over=True)
            del self._held[read_fd]
            del self._workers[read_fd]
            os.close(read_fd)
            return False
        if worker in self._tails:
            tail = self._tails[worker]
            tail += data[-TAIL_BYTES:]
            del tail[:-TAIL_BYTES]
        self._held[read_fd] += data
        self._let_go(read_fd)
        return True

    def _keep_stack(self, worker: int, held: bytearray) -> None:
        if worker in self._tails and held.startswith(_STACKS):
            self._stacks[worker] = bytes(held)
            held.clear()

    def _let_go(self, read_fd: int, *, is_over: bool = False) -> None:
        """Passes on what is whole of what was read; all if nothing is to follow."""
        held = self._held[read_fd]
        stop = len(held)
        if not is_over and stop <= _MAX_HELD_BYTES and self._workers[read_fd] >= 0:
            ends = 1 + max(held.rfind(b"\n"), held.rfind(b"\r"))
            stop = min([ends, *(held.index(s) for s in _STACKS if s in held)])
        if stop:
            self._pass_on(bytes(held[:stop]))
            del held[:stop]

    def _pass_on(self, data: bytes) -> None:
        room = _MAX_UNSENT_BYTES - len(self._unsent)
        if len(data) > room:
            self._num_dropped += len(data)
            return
        if self._num_dropped:
            note = f"[envserve: {self._num_dropped} bytes of workers left out here]\n"
            self._unsent += note.encode()
            self._num_dropped = 0
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        """Writes as much as can be written without waiting for the reader."""
        can_write = select.poll()
        can_write.register(self._out_fd, select.POLLOUT)
        try:
            # So little is taken without blocking, if anything is.
            while self._unsent and can_write.poll(0):
                sent = os.write(self._out_fd, self._unsent[: select.PIPE_BUF])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more, or the disk is full
            self._unsent.clear()
        if self._unsent:
            self._poller.register(self._out_fd, select.POLLOUT)
        else:
            with contextlib.suppress(KeyError):
                self._poller.unregister(self._out_fd)


def _writable(stderr_fd: int) -> int:
    """Returns a descriptor to write to, if possible one that never waits for a reader.

    Where the system can, a description of our own is opened: the one that we were
    given is shared with our owner, and must stay as it is.
    """
    try:
        if stat.S_ISREG(os.fstat(stderr_fd).st_mode):
            return stderr_fd  # whose place in the file is everybody's
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_APPEND
        return os.open(f"/proc/self/fd/{stderr_fd}", flags)
    except OSError:  # no such system, a socket, another user's terminal, or closed
        return stderr_fd
