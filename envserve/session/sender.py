"""What a client sends: each message carries the numbers of its session and lease.

Requests are kept until they are answered; what is sent once needs no answer, or is
replaced by the next of its kind.
"""

from __future__ import annotations

from typing import Final

from envserve.session.requests import Draft, Outbox, Requests
from envserve.session.silence import Silence
from envserve.wire import Buffer, Message, MessageType, encode

__all__ = ["Sender", "next_session"]

#: Request number of what is not sent again; requests count from 1.
_UNNUMBERED: Final = 0
#: An odd number: all session numbers differ before they repeat.
_STRIDE: Final = 0x9E3779B97F4A7C15


class Sender:
    """Numbers messages, and puts them into the outbox.

    Attributes:
      session: Number of the session.
      boot: Number of the server's start; 0 until it has said WELCOME.
      epoch: Number of the lease; 0 until it is granted.
      outbox: What the shell has to send.
      requests: What is in flight.
      silence: Since when an answer is missing.
    """

    def __init__(self, session: int, now: float) -> None:
        """Starts with nothing to send; `session` as for `ClientSession`."""
        self.session = session
        self.boot = 0
        self.epoch = 0
        self.outbox = Outbox()
        self.requests = Requests(self.outbox)
        self.silence = Silence(now)
        self._next_request = 1

    def reserve(self) -> int:
        """Returns the number of a request that is to be sent.

        Who notes it before knows of the request, even if an interrupt comes as it is
        sent.
        """
        request = self._next_request
        self._next_request += 1
        return request

    def request(self, draft: Draft, now: float, number: int = 0) -> int:
        """Sends a request; returns its number, which is new unless it was reserved."""
        request = number or self.reserve()
        message = Message(
            type=draft.type,
            session=self.session,
            boot=self.boot,
            epoch=self.epoch,
            request=request,
            flags=draft.flags,
            entries=draft.entries,
            body=draft.body,
            payload=draft.payload,
        )
        self.requests.add(message, draft, now)
        self.silence.expect_answer(now)
        return request

    def say(self, type_: MessageType) -> None:
        """Sends a message without content, once."""
        self.repeat(self.encode(type_))

    def encode(self, type_: MessageType) -> list[Buffer]:
        """Encodes a message without content, under the present numbers."""
        message = Message(
            type=type_,
            session=self.session,
            boot=self.boot,
            epoch=self.epoch,
            request=_UNNUMBERED,
        )
        return encode(message)

    def repeat(self, frames: list[Buffer]) -> None:
        """Sends once what was encoded before."""
        self.outbox.put(_UNNUMBERED, frames)

    def ping(self, now: float) -> None:
        """Asks for a sign of life."""
        self.say(MessageType.PING)
        self.silence.postpone_ping(now)

    def change_session(self) -> None:
        """Begins another session: answers to this one are strange from now on."""
        self.session = next_session(self.session)
        self.boot = self.epoch = 0


def next_session(session: int) -> int:
    """Returns another number, so that answers to the old one are told apart."""
    return (session + _STRIDE) & 0xFFFFFFFFFFFFFFFF or _STRIDE
