"""Answer STATUS and FRAME requests about a batch whose envs run in this process.

A thread answers as a server does, at an ipc address that only this user can reach; its
leases are the batch's lanes, numbered from 1. It only reads counters and shared memory,
and sleeps forty-nine times as long as it has computed.
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

from envserve.client.batch_env import BatchEnv
from envserve.errors import RemoteProtocolError
from envserve.pool.pool import Pool
from envserve.pool.pool_metrics import status_fields, sum_counts
from envserve.session.server.decisions import Reply
from envserve.session.server.replies import ReplyBuilder
from envserve.wire.bodies import FrameRequest
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.message import decode
from envserve.wire.sockets import NOBLOCK, socket_folder
from envserve.wire.status import ServerStatus

__all__ = ["LocalStatusServer"]

_LOGGER: Final = logging.getLogger(__name__)
_REST: Final = 49
_MAX_EPISODES: Final = 256
_MAX_MESSAGE_BYTES: Final = 64 << 10


class LocalStatusServer:
    """Answer observers of a batch, until it is closed; a context manager.

    Attributes:
      address: For `envserve page`, `top` and `status`.
    """

    def __init__(self, batch: BatchEnv) -> None:
        """Start to answer, for local lanes only: servers answer for theirs."""
        self._pools = [lane for lane in batch.lanes if isinstance(lane, Pool)]
        self._answers = ReplyBuilder(secrets.randbits(63) | 1, shows_paths=True)
        self._started_at = time.monotonic()
        self._folder = socket_folder()
        self.address = f"ipc://{self._folder.name}/status"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._socket.bind(self.address)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; may be called twice, and before or after the batch is closed."""
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
                    begin = time.thread_time()
                    parts = [route, *self._answer(route, frames).frames]
                    self._socket.send_multipart(parts, NOBLOCK)
                except zmq.ContextTerminated:
                    return
                except RemoteProtocolError:
                    continue
                except Exception:
                    _LOGGER.exception("a question about a batch could not be answered")
                self._is_closing.wait(_REST * (time.thread_time() - begin))

    def _answer(self, route: bytes, frames: list[bytes]) -> Reply:
        asked, kinds = decode(frames), MessageType
        asked.peer = (route, "local")
        if asked.type is kinds.STATUS:
            body = self._status().encode()
            return self._answers.reply(asked, kinds.STATUS_RESULT, body)
        try:
            request = FrameRequest.decode(asked.body)
            if not 1 <= request.lease <= len(self._pools):
                text = f"there is no lease {request.lease}"
                return self._answers.refused(asked, ErrorCode.LEASE_LOST, text)
            result, record = self._pools[request.lease - 1].inspector.read_frames(
                request
            )
        except RemoteProtocolError as error:
            return self._answers.refused(asked, ErrorCode.BAD_MESSAGE, str(error))
        body = result.encode()
        return self._answers.reply(asked, kinds.FRAME_RESULT, body, payload=record)

    def _status(self) -> ServerStatus:
        now, pools = time.monotonic(), self._pools
        leases = []
        for number, pool in enumerate(pools, 1):
            pool.metrics.watch(now)
            known = {"number": number, "seconds": now - self._started_at}
            leases.append(pool.inspector.status(_MAX_EPISODES, **known))
        return ServerStatus(
            **status_fields(sum_counts(pool.metrics.counts for pool in pools)),
            version=version("envserve"),
            host=platform.node(),
            pid=os.getpid(),
            seconds=now - self._started_at,
            num_workers=sum(len({b.worker for b in pool.blocks}) for pool in pools),
            total_envs=sum(pool.num_envs for pool in pools),
            in_flight=sum(lease.in_flight for lease in leases),
            num_leases=len(leases),
            leases=tuple(leases),
        )
