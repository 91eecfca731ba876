"""How long the server has not answered, as far as it is to blame for that."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["Silence"]

_PING_SECONDS: Final = 1.0
#: Silence, though something was asked, after which callers need not wait any more.
_UNREACHABLE_SECONDS: Final = 3.5
#: The same for a connection that is broken.
_BROKEN_SECONDS: Final = 1.0
#: Longer than any wait of ours: after such a gap, it is we who have slept.
_NAP_SECONDS: Final = 5.0


class Silence:
    """Counted from the first message that is not answered.

    Attributes:
      since: When it began; None while nothing is unanswered.
      ping_at: When to ask for a sign of life.
      total_seconds: All silences that were longer than a ping takes.
    """

    def __init__(self, now: float) -> None:
        """Begins, since the server has said nothing yet."""
        self.since: float | None = now
        self.ping_at = math.inf
        self.total_seconds = 0.0
        self._broken_since: float | None = None
        self._looked_at = now

    def hear(self, now: float) -> None:
        """Notes a message of the server."""
        if self.since is not None:
            if now - self.since > _PING_SECONDS:
                self.total_seconds += now - self.since
            self.since = None
        self.ping_at = now + _PING_SECONDS

    def expect_answer(self, now: float) -> None:
        """Notes that the server was asked something."""
        if self.since is None:
            self.since = now

    def postpone_ping(self, now: float) -> None:
        """Notes that it was asked for a sign of life."""
        self.ping_at = now + _PING_SECONDS
        self.expect_answer(now)

    def break_off(self, now: float) -> None:
        """Notes that the connection has broken."""
        if self._broken_since is None:
            self._broken_since = now

    def mend(self) -> None:
        """Notes that there is a connection again."""
        self._broken_since = None

    def look(self, now: float) -> None:
        """Notes that we are awake; does not count time in which we were not."""
        if now - self._looked_at > _NAP_SECONDS:
            if self.since is not None:
                self.since = now
            if self._broken_since is not None:
                self._broken_since = now
        self._looked_at = now

    @property
    def unreachable_at(self) -> float:
        """From when on the server counts as unreachable."""
        at = math.inf if self.since is None else self.since + _UNREACHABLE_SECONDS
        if self._broken_since is not None:
            at = min(at, self._broken_since + _BROKEN_SECONDS)
        return at
