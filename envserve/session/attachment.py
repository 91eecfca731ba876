"""How a client gets its envs, for the first time or anew: HELLO, then ATTACH.

Whatever it gets later has the shape of what it got first, and seeds of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from envserve.errors import EnvserveError, ProtocolMismatch, RemoteProtocolError
from envserve.session.away import Away
from envserve.session.operations import Operations
from envserve.session.requests import Draft
from envserve.session.sender import Sender
from envserve.session.states import ClientState
from envserve.wire import (
    MIN_VERSION,
    VERSION,
    Attach,
    Granted,
    Hello,
    Message,
    MessageType,
    Welcome,
)

__all__ = ["Attachment", "attach_again"]

#: More often than that no env is rebuilt within a lease.
_INCARNATIONS_PER_LEASE: Final = 1 << 18


class Attachment:
    """A client's claim to its envs.

    Attributes:
      address: The server's, for messages.
      state: See `ClientState`.
      error: Why the session is LOST.
      num_leases: How many leases were granted.
      request: Number of the last ATTACH.
      operations: What the envs are up to; None until they are granted.
      away: Which of them are away; with the operations.
    """

    def __init__(
        self, address: str, attach: Attach, sender: Sender, client: str
    ) -> None:
        """Starts CONNECTING; the arguments are those of `ClientSession`."""
        self.address = address
        self.state = ClientState.CONNECTING
        self.error: EnvserveError | None = None
        self.num_leases = 0
        self.request = 0
        self.operations: Operations | None = None
        self.away: Away | None = None
        self._attach = attach
        self._sender = sender
        self._client = client
        self._max_message_bytes = 0

    def say_hello(self, now: float) -> None:
        """Begins from the beginning."""
        self._sender.requests.clear()
        self._sender.boot = 0
        self.state = ClientState.HELLO_SENT
        body = Hello(client=self._client).encode()
        draft = Draft(type=MessageType.HELLO, entries=(), body=body)
        self._sender.request(draft, now)

    def welcome(self, message: Message, now: float) -> None:
        """Goes on to ATTACH, if the server speaks our version."""
        welcome = Welcome.decode(message.body)
        if welcome.min_version > VERSION or welcome.max_version < MIN_VERSION:
            self.lose(
                ProtocolMismatch(
                    f"{self.address}: the server speaks protocol versions "
                    f"{welcome.min_version} to {welcome.max_version}, this client "
                    f"{MIN_VERSION} to {VERSION}; install the same release"
                )
            )
            return
        self._sender.requests.clear()
        self._sender.boot = message.boot
        self._max_message_bytes = welcome.max_message_bytes
        self.ask_for_envs(now)

    def ask_for_envs(self, now: float) -> None:
        """Sends an ATTACH, as the present session."""
        self.state = ClientState.ATTACHING
        body = attach_again(self._attach, self.num_leases).encode()
        draft = Draft(type=MessageType.ATTACH, entries=(), body=body)
        self.request = self._sender.request(draft, now)

    def check(self, message: Message) -> Granted:
        """Decodes a GRANTED.

        Raises:
          RemoteProtocolError: They are not the envs that we can use.
        """
        granted = Granted.decode(message.body, self._attach.num_envs)
        self._check_usable(granted)
        if self.operations is not None:
            _check_equal(granted, self.operations)
        return granted

    def take(self, granted: Granted) -> None:
        """Becomes READY with what was granted."""
        if self.operations is not None and self.away is not None:
            self.operations.begin_lease()
        else:
            self.operations = Operations(self.address, granted.spec, granted.blocks)
            self.away = Away(self.operations, self._sender)
        self._sender.epoch = granted.epoch
        self.num_leases += 1
        self.state = ClientState.READY
        self._sender.requests.remove(self.request)

    def _check_usable(self, granted: Granted) -> None:
        num_envs = self._attach.num_envs
        needed = num_envs * sum(leaf.nbytes for leaf in granted.spec.action_leaves)
        if needed > self._max_message_bytes:
            raise RemoteProtocolError(
                f"actions of {num_envs} envs need {needed} bytes, and the server "
                f"accepts {self._max_message_bytes} at once; start it with a larger "
                f"--max-message-mib"
            )
        if self._attach.spare_envs and not granted.spare_envs:
            raise RemoteProtocolError(
                "expected envs with spares; got envs without from a server that does "
                "not know them; update the server, or leave out spare_envs"
            )
        if self._attach.wrappers and not granted.is_wrapped:
            raise RemoteProtocolError(
                "expected envs in wrappers; got bare ones from a server that does not "
                "know of them; update the server, or leave out wrappers"
            )

    # How it ends.

    def give_back(self, now: float) -> None:
        """Forgets all, and tells the server that the envs are not needed."""
        was_attached = self.state in (ClientState.ATTACHING, ClientState.READY)
        self._sender.requests.clear()
        if self.operations is not None and self.away is not None:
            self.away.clear()
            self.operations.abandon()
        self.state = ClientState.CLOSING if was_attached else ClientState.CLOSED
        if was_attached:
            self._sender.request(Draft(type=MessageType.DETACH, entries=()), now)

    def close(self) -> None:
        """Ends it, since the server has the envs."""
        self._sender.requests.clear()
        self.state = ClientState.CLOSED

    def lose(self, error: EnvserveError) -> None:
        """Ends it with an error, which all that is in flight gets."""
        self.state = ClientState.LOST
        self.error = error
        self._sender.requests.clear()
        if self.operations is not None and self.away is not None:
            self.away.clear()
            self.operations.lose(error)

    def refuse(self, error: EnvserveError) -> None:
        """Ends it likewise, and tells the server, which may think that it goes on."""
        self.lose(error)
        self._sender.say(MessageType.DETACH)


def _check_equal(granted: Granted, before: Operations) -> None:
    """Refuses other envs than before: rows have their shapes and places."""
    different = list(before.spec.differences(granted.spec))
    if granted.blocks != before.blocks:
        different.append(
            f"blocks: {len(before.blocks)} before, {len(granted.blocks)} other ones "
            f"now; start the server with as many --workers"
        )
    if different:
        raise RemoteProtocolError(
            f"expected envs as before; got other ones: {'; '.join(different)}"
        )


def attach_again(attach: Attach, num_leases: int) -> Attach:
    """Returns what to ask for after so many leases: the same, with other seeds."""
    first = attach.first_incarnation + num_leases * _INCARNATIONS_PER_LEASE
    return replace(attach, first_incarnation=first & 0xFFFFFFFF)
