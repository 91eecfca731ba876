"""Who takes more than its share of the loop, while others wait.

A share is milliseconds of the loop: one message can take as long as thousands. Who
waits for answers before it asks for more leaves nothing unread for long. Whose messages
stand in the queue, and who has had more than others, has them dropped unread. They are
not lost: clients send again what is not answered. Who goes on as if nothing had been
dropped is no such client, and is to be shut out: even to drop takes time.

Steps do not count against their user: of each leased block there is one at a time.
"""

from __future__ import annotations

import math
from typing import Final

from envserve.session.server.quotas import KEYLESS_USERS, Quotas
from envserve.wire.message import Peer

#: How long messages are read before the loop turns to pools and timers.
_TURN_SECONDS: Final = 0.002
#: How soon it is forgotten what was used.
_MEMORY_SECONDS: Final = 1.0
_NOTHING: Final = 1e-5
#: How often users are judged.
_JUDGE_SECONDS: Final = 0.01
#: A queue that stands so long is not of clients that wait for answers.
_STANDING_SECONDS: Final = 0.02
#: What anybody may use within a second, and how many times as much as others: hardly
#: any client asks for more than steps.
_FREE_SECONDS: Final = 0.05
_TOLERANCE: Final = 0.5
#: More than is dropped of who sends again what is not answered, within _MEMORY_SECONDS.
_FLOOD_MESSAGES: Final = 5_000
_FLOOD_BYTES: Final = 64 << 20
#: How long not to read while all that waits is to be dropped. A message of another user
#: ends that at once: it makes the socket readable anew.
_PAUSE_SECONDS: Final = 0.002


class FairShare:
    """Counts what each user takes of the loop, turn by turn, and judges it.

    Attributes:
      throttled: The user whose messages are dropped unread, if there is one.
      flooder: The user to be shut out, if this turn has found one.
    """

    def __init__(self, quotas: Quotas) -> None:
        """Starts with nothing used; `quotas` know how users' shares compare."""
        self.throttled: str | None = None
        self.flooder: str | None = None
        self._quotas = quotas
        #: Seconds of the loop by user, in all and but for steps; and how often it left
        #: something unread.
        self._used: dict[str, float] = {}
        self._unearned: dict[str, float] = {}
        self._left: dict[str, float] = {}
        #: What was dropped, where 1 is a flood.
        self._dropped: dict[str, float] = {}
        self._judged_at = 0.0
        #: Since when something is left unread at every turn's end.
        self._standing_at = math.inf
        #: Of the turn: its latest instant and user, its end, and whom it dropped first.
        self._now = self._ends_at = 0.0
        self._user = ""
        self._is_step = False
        self._first_dropped: Peer | None = None

    def begin_turn(self, now: float) -> None:
        """Begins to read messages."""
        self._now, self._ends_at = now, now + _TURN_SECONDS
        self._first_dropped = self.flooder = None

    def admits(self, peer: Peer, num_bytes: int) -> bool:
        """Tells whether a peer's message is to be handled."""
        self._user = peer[-1]
        if self._user != self.throttled:
            self._first_dropped = None
            return True
        self.note_dropped(1, num_bytes)
        if self._first_dropped is None:
            self._first_dropped = peer
        elif self._first_dropped == peer:  # since then, whoever waits was heard
            self._ends_at = 0.0
        return False

    def note_dropped(self, num_messages: int, num_bytes: int) -> None:
        """Notes what was dropped of the latest one's user; bytes may be no message."""
        if self._user not in KEYLESS_USERS:  # else there is none to shut out
            part = num_messages / _FLOOD_MESSAGES + num_bytes / _FLOOD_BYTES
            self._dropped[self._user] = self._dropped.get(self._user, 0.0) + part

    def charge(
        self, now: float, user: str | None = None, *, is_step: bool = False
    ) -> bool:
        """Notes what was done with a message; tells whether the turn is over.

        Args:
          now: The instant.
          user: Whose it is, unless that of the message that was admitted last.
          is_step: Whether it began a step, which no other message had asked for.
        """
        self._user = user = user or self._user
        seconds, self._now, self._is_step = now - self._now, now, is_step
        self._used[user] = self._used.get(user, 0.0) + seconds
        if not is_step:
            self._unearned[user] = self._unearned.get(user, 0.0) + seconds
        return now >= self._ends_at

    def end_turn(self, is_drained: bool) -> float:
        """Judges users now and then; returns for how long not to read.

        It is drained if nothing is left unread.
        """
        if is_drained:
            self._standing_at, self.throttled = math.inf, None
        else:
            self._standing_at = min(self._standing_at, self._now)
            if not self._is_step:
                self._left[self._user] = self._left.get(self._user, 0.0) + 1.0
        if self._now >= self._judged_at + _JUDGE_SECONDS:
            self._judge(self._now)
        return 0.0 if is_drained or self.throttled is None else _PAUSE_SECONDS

    def _judge(self, now: float) -> None:
        kept = math.exp((self._judged_at - now) / _MEMORY_SECONDS)
        self._judged_at = now
        flooder = next((u for u, part in self._dropped.items() if part > 1), None)
        if flooder is not None:
            self.flooder = flooder
            del self._dropped[flooder]  # it is reported once
        for counts in (self._used, self._unearned, self._left, self._dropped):
            for user in list(counts):
                counts[user] *= kept
                if counts[user] < _NOTHING:
                    del counts[user]
        self.throttled = None
        is_standing = now >= self._standing_at + _STANDING_SECONDS
        if not (is_standing and self._left) or len(self._used) < 2:
            return
        user = max(self._left, key=self._left.__getitem__)
        used = {u: t / self._quotas.weight_of(u) for u, t in self._used.items()}
        own = self._unearned.get(user, 0.0) / self._quotas.weight_of(user)
        used.pop(user, 0.0)
        share = _TOLERANCE * sum(used.values()) / len(used)
        if own > max(_FREE_SECONDS, share):
            self.throttled = user
