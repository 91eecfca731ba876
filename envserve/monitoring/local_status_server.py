"""Reply to STATUS and FRAME requests about a batch made by `BatchEnv.local`.

A thread of the training process replies like a server, at an ipc address that only
this user can connect to. Each local lane of the batch is reported as a lease; the first
one has number 1. The thread only reads counters and shared memory, and pauses after
each reply, so it uses at most 2 % of a core.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import threading
import time
from importlib.metadata import version
from typing import Final, Self

import zmq
from msgspec.structs import replace

from envserve.client.batch_env import BatchEnv
from envserve.errors import RemoteProtocolError
from envserve.pool.pool import Pool
from envserve.pool.pool_metrics import status_fields, sum_counts
from envserve.python_process import build_commit
from envserve.session.server.decisions import Reply
from envserve.session.server.reply_builder import ReplyBuilder
from envserve.wire.bodies import FrameRequest
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.message import decode
from envserve.wire.sockets import NOBLOCK, exclude_other_users, socket_folder
from envserve.wire.status import ServerStatus

__all__ = ["LocalStatusServer"]

_LOGGER: Final = logging.getLogger(__name__)
#: The pause after a reply, as a multiple of the CPU time that the reply took.
_PAUSE_FACTOR: Final = 49
_MAX_EPISODES: Final = 256
_MAX_MESSAGE_BYTES: Final = 64 << 10


class LocalStatusServer:
    """A thread that replies to requests about a batch; a context manager.

    Attributes:
      address: Address to pass to `envserve page`, `top` and `status`.
    """

    def __init__(self, batch: BatchEnv) -> None:
        """Start the thread, which reports only the local lanes of the batch."""
        self._pools = [lane for lane in batch.lanes if isinstance(lane, Pool)]
        self._replies = ReplyBuilder(secrets.randbits(63) | 1, shows_paths=True)
        self._started_at, self._commit = time.monotonic(), build_commit()
        self._folder = socket_folder()
        self.address = f"ipc://{self._folder.name}/status"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        exclude_other_users(self._socket)
        self._socket.bind(self.address)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; may be called twice, before or after the batch is closed."""
        self._is_closing.set()
        self._context.term()  # wakes the thread, which closes the socket
        self._thread.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LocalStatusServer {self.address}, {len(self._pools)} pools>"

    def _run(self) -> None:
        with self._socket:
            while not self._is_closing.is_set():
                try:
                    route, *frames = self._socket.recv_multipart()
                    started_at = time.thread_time()
                    parts = [route, *self._reply_to(route, frames).frames]
                    self._socket.send_multipart(parts, NOBLOCK)
                except zmq.ContextTerminated:
                    return
                except RemoteProtocolError:
                    continue
                except Exception:
                    _LOGGER.exception("could not reply to a status request")
                self._is_closing.wait(_PAUSE_FACTOR * (time.thread_time() - started_at))

    def _reply_to(self, route: bytes, frames: list[bytes]) -> Reply:
        request, kinds = decode(frames), MessageType
        request.peer = (route, "local")
        if request.type is kinds.STATUS:
            body = self._status().encode()
            return self._replies.reply(request, kinds.STATUS_RESULT, body)
        try:
            frame_request = FrameRequest.decode(request.body)
            if not 1 <= frame_request.lease <= len(self._pools):
                text = f"there is no lease {frame_request.lease}"
                return self._replies.rejection(request, ErrorCode.LEASE_LOST, text)
            pool = self._pools[frame_request.lease - 1]
            result, record = pool.read_frames(frame_request)
        except RemoteProtocolError as error:
            return self._replies.rejection(request, ErrorCode.BAD_MESSAGE, str(error))
        body = result.encode()
        return self._replies.reply(request, kinds.FRAME_RESULT, body, payload=record)

    def _status(self) -> ServerStatus:
        now, pools = time.monotonic(), self._pools
        leases = []
        for number, pool in enumerate(pools, 1):
            pool.metrics.start_tracking(now)
            lease = {"number": number, "seconds": now - self._started_at}
            status = pool.status(_MAX_EPISODES, **lease)
            # The envs of a closed batch are not reported as absent, because they will
            # not be replaced.
            leases.append(replace(status, absent=()) if pool.is_closed else status)
        return ServerStatus(
            **status_fields(sum_counts(pool.metrics.counts for pool in pools)),
            version=version("envserve"),
            commit=self._commit,
            host=platform.node(),
            pid=os.getpid(),
            seconds=now - self._started_at,
            num_workers=sum(len({b.worker for b in pool.blocks}) for pool in pools),
            total_envs=sum(pool.num_envs for pool in pools),
            in_flight=sum(lease.in_flight for lease in leases),
            num_leases=len(leases),
            leases=tuple(leases),
        )
