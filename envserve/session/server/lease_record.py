"""One client's claim on envs, from its ATTACH until they are free."""

from __future__ import annotations

from dataclasses import dataclass, field

from envserve.session.server.decisions import Repeats, SessionId
from envserve.session.server.lease import Lease
from envserve.session.server.quotas import Amounts
from envserve.session.states import ClaimState, Machine
from envserve.settings import HostSettings
from envserve.wire.bodies import Attach
from envserve.wire.handshake import ErrorBody
from envserve.wire.message import Message

__all__ = ["Claim"]


@dataclass(slots=True)
class Claim:
    """One client's claim on envs.

    Attributes:
      session: Its user, and the number that the client drew, which is a secret.
      number: Of all claims of this start of the server; the epoch of its lease.
      policy: What the host allows to its user.
      amounts: What it takes.
      attach: What it asked for.
      attach_body: The same, as bytes, to know a copy by.
      asked: Its latest ATTACH or DETACH, with the peer of its latest message.
      client: Its user, and what the client calls itself, fit for a line of a log.
      since: When it came first.
      heard_at: When the client was heard last.
      machine: Where it is.
      is_waiting: Whether nothing was done about its envs yet.
      lease: The operations on its envs, while GRANTED.
      granted: Body of GRANTED.
      row_mib: What its rows take.
      reason: Why it is CLOSING; None for a DETACH.
      repeats: How often it was told again that it is granted.
      account: What its envs have done, as its end is told in a log.
    """

    session: SessionId
    number: int
    policy: HostSettings
    amounts: Amounts
    attach: Attach
    attach_body: bytes
    asked: Message
    client: str
    since: float
    heard_at: float
    machine: Machine[ClaimState] = field(
        default_factory=lambda: Machine(ClaimState.BUILDING)
    )
    is_waiting: bool = True
    lease: Lease | None = None
    granted: bytes = b""
    row_mib: int = 0
    reason: ErrorBody | None = None
    repeats: Repeats = field(default_factory=Repeats)
    account: dict[str, float] = field(default_factory=dict)

    @property
    def user(self) -> str:
        """Whose it is; "" where users are not known."""
        return self.session[0]

    @property
    def state(self) -> ClaimState:
        """See `ClaimState`."""
        return self.machine.state

    @property
    def fields(self) -> dict[str, object]:
        """What a log of JSON says of it."""
        asked = {"env": self.attach.env_name, "num_envs": self.attach.num_envs}
        return {"lease": self.number, "client": self.client, **asked, **self.account}

    @property
    def done(self) -> str:
        """What its envs have done, in words."""
        text = (
            " after {env_steps:,} env steps in {seconds:,.1f} s, "
            "{steps_per_second:,.0f}/s, faults: {num_faults}"
        )
        return text.format(**self.account) if self.granted and self.account else ""

    @property
    def name(self) -> str:
        """What a log calls it."""
        return f"lease {self.number}" + (f" of {self.user}" if self.user else "")

    def __str__(self) -> str:
        return f"{self.name}: {self.attach.num_envs} {self.attach.env_name}"
