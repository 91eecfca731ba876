"""A read-only client for the status and frames of a server; it needs no lease."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from envserve.address import complete_address
from envserve.client.link.connection import Connection
from envserve.client.link.sessionless_requests import request
from envserve.wire.constants import MAX_RECORD_BYTES, MessageType
from envserve.wire.message import Message
from envserve.wire.status import ServerStatus

if TYPE_CHECKING:
    from envserve.lane import RenderedFrame

__all__ = ["Observer"]


class Observer:
    """A connection for requests that need no lease. Not thread-safe."""

    def __init__(self, address: str, *, insecure: bool = False) -> None:
        """Start connecting; see `Connection` for the arguments and errors.

        The address may have a short form, like "sim1".
        """
        self.address = complete_address(address)
        self._connection = Connection(self.address, insecure=insecure)
        self._num_requests = 0

    def status(self, timeout_seconds: float = 2.0) -> ServerStatus:
        """Return the current status of the server.

        Raises:
          ConnectError: No server replied in time.
          ProtocolMismatch: The server supports only other protocol versions, or a
            version without STATUS.
          EnvStartError: The server no longer accepts this key.
          RemoteProtocolError: The peer is not an envserve server.
        """
        reply = self.request(
            MessageType.STATUS, MessageType.STATUS_RESULT, timeout_seconds
        )
        return ServerStatus.decode(reply.body)

    def frames(
        self,
        lease: int,
        rows: Sequence[int],
        width: int = 160,
        timeout_seconds: float = 2.0,
        after: Sequence[int] = (),
    ) -> list[RenderedFrame]:
        """Return the latest frame of each row.

        The server renders these rows until 3 s after the last request for frames.

        Args:
          lease: Number of the lease, from `LeaseStatus`.
          rows: Rows of the lease, at most 64.
          width: Width of the frames in pixels.
          timeout_seconds: Maximum time to wait for the reply.
          after: Serial number of the last frame received for each row; only newer
            frames are returned. By default, all latest frames are returned.

        Raises:
          LeaseLost: There is no such lease, or it belongs to another user.
          EnvserveError: The request failed; see `status`.
        """
        from envserve.wire.bodies import FrameResult

        fields = {"rows": tuple(rows), "width": width, "after": tuple(after)}
        reply = self._request_frames(timeout_seconds, lease=lease, **fields)
        return [*FrameResult.decode(reply.body).pictures]

    def record(self, lease: int, row: int, timeout_seconds: float = 5.0) -> bytes:
        """Return the flight record of an env, as a repro file for `envserve replay`.

        Raises:
          LocalProtocolError: There is no such row, or its env was never reset.
          EnvserveError: The request failed; see `status`.
        """
        if self._connection.max_frame_bytes < MAX_RECORD_BYTES:
            self._connection.renew(MAX_RECORD_BYTES)
        fields: dict[str, Any] = {"lease": lease, "rows": (row,), "record": True}
        return bytes(self._request_frames(timeout_seconds, **fields).payload)

    def _request_frames(self, timeout_seconds: float, **fields: Any) -> Message:
        from envserve.wire.bodies import FrameRequest

        body = FrameRequest(**fields).encode()
        return self.request(
            MessageType.FRAME, MessageType.FRAME_RESULT, timeout_seconds, body
        )

    def request(
        self, kind: MessageType, reply: MessageType, timeout: float, body: bytes = b""
    ) -> Message:
        """Send a request and return its reply; see `request` for the errors."""
        self._num_requests += 1
        message = Message(kind, request=self._num_requests, body=body)
        return request(self._connection, message, reply, timeout)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Observer {self.address}, {self._num_requests} requests>"
