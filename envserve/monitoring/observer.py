"""Looks at a server, or at whatever speaks like one, without having envs of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from envserve.client.link.connection import Connection
from envserve.client.link.probe import request
from envserve.wire.constants import MAX_RECORD_BYTES, MessageType
from envserve.wire.message import Message
from envserve.wire.status import ServerStatus

if TYPE_CHECKING:
    from envserve.lane import RenderedFrame

__all__ = ["Observer"]


class Observer:
    """A connection for questions that need no lease. Of one thread at a time."""

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        """Begins to connect; see `Connection`, also for what it raises."""
        self.address = address
        self._connection = Connection(address, insecure=insecure)
        self._num_asked = 0

    def status(self, timeout_seconds: float = 2.0) -> ServerStatus:
        """Asks what the server is doing.

        Raises:
          ConnectError: No server answered in time.
          ProtocolMismatch: It is too old to know, or speaks other versions.
          EnvStartError: It refuses, since this key is not good there any more.
          RemoteProtocolError: What answers is no server of ours.
        """
        kinds = MessageType.STATUS, MessageType.STATUS_RESULT
        return ServerStatus.decode(self.ask(*kinds, timeout_seconds).body)

    def frames(
        self,
        lease: int,
        rows: Sequence[int],
        width: int = 160,
        timeout_seconds: float = 2.0,
        after: Sequence[int] = (),
    ) -> list[RenderedFrame]:
        """Has pictures of envs be made for 3 s, and returns those there are by now.

        Args:
          lease: Its number, as of `LeaseStatus`.
          rows: At most 64; see `FrameRequest` for these.
          width: Pixels.
          timeout_seconds: Longest to wait.
          after: Serials that are known.

        Raises:
          LeaseLost: There is no such lease, or it is another user's.
          EnvserveError: As for `status`.
        """
        from envserve.wire.bodies import FrameResult

        asked = {"rows": tuple(rows), "width": width, "after": tuple(after)}
        answer = self._look(timeout_seconds, lease=lease, **asked)
        return [*FrameResult.decode(answer.body).pictures]

    def record(self, lease: int, row: int, timeout_seconds: float = 5.0) -> bytes:
        """Returns the flight record of an env, a file for `envserve replay`.

        Raises:
          LocalProtocolError: There is no such row, or it was never reset.
          EnvserveError: As for `frames`.
        """
        if self._connection.max_frame_bytes < MAX_RECORD_BYTES:
            self._connection.renew(MAX_RECORD_BYTES)
        answer = self._look(timeout_seconds, lease=lease, rows=(row,), record=True)
        return bytes(answer.payload)

    def _look(self, timeout_seconds: float, **asked: Any) -> Message:
        from envserve.wire.bodies import FrameRequest

        kinds = MessageType.FRAME, MessageType.FRAME_RESULT
        return self.ask(*kinds, timeout_seconds, FrameRequest(**asked).encode())

    def ask(
        self, kind: MessageType, answer: MessageType, timeout: float, body: bytes = b""
    ) -> Message:
        """Send a request of some type and return its answer; see `probe.request`."""
        self._num_asked += 1
        question = Message(kind, request=self._num_asked, body=body)
        return request(self._connection, question, answer, timeout)

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Observer {self.address}, {self._num_asked} questions>"
