"""Finds users whose messages take more than a fair share of the event loop's time.

The server measures time instead of counting messages, because one message can take as
long as thousands of others. If a client waits for replies, its messages do not remain
unread for long. A user is throttled, which means that its messages are dropped, only if
three conditions hold:

* The sockets have not been empty for a while, so other users have to wait.
* Some of the unread messages are from this user.
* The user has used more than half of the other users' average time, weighted by the
  shares of their keys. The user's steps do not count, because each leased block runs
  at most one step at a time.

Clients resend unanswered requests, so dropping messages loses nothing. A user who
continues to send at the same rate does not wait for replies. Such a user is reported as
a flooder, because even dropping messages takes time; see the decision "A flood is
recognised by its loop time and its unread messages".
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

from envserve.session.server.quotas import KEYLESS_USERS, Quotas
from envserve.wire.message import Peer

#: Maximum seconds to read messages before pools and timers get their turn.
_TURN_SECONDS: Final = 0.002
#: Time constant of the exponential decay of all counts.
_DECAY_SECONDS: Final = 1.0
#: Counts below this value are deleted.
_NEGLIGIBLE: Final = 1e-5
#: Seconds between two updates of `throttled` and `flooder`.
_UPDATE_SECONDS: Final = 0.01
#: Seconds for which messages must be unread before a user is throttled. Clients that
#: wait for their replies cause no such backlog.
_BACKLOG_SECONDS: Final = 0.02
#: Seconds of loop time, excluding steps, that every user may use within
#: `_DECAY_SECONDS`. Clients seldom need more, because most of their messages are steps.
_FREE_SECONDS: Final = 0.05
#: Above `_FREE_SECONDS`, a user may use at most this fraction of the mean loop time of
#: the other users.
_MAX_RELATIVE_SECONDS: Final = 0.5
#: Dropped messages and bytes within `_DECAY_SECONDS` that make a user a flooder. A
#: client that resends unanswered requests stays below these limits.
_FLOOD_MESSAGES: Final = 5_000
_FLOOD_BYTES: Final = 64 << 20
#: Seconds to pause reading while a user is throttled. A message from another user ends
#: the pause, because it makes the socket readable again.
_PAUSE_SECONDS: Final = 0.002


class FairShare:
    """Measures each user's time in the event loop, and finds users to throttle.

    In each turn call `begin_turn`, then `admits` and `charge` for each message, then
    `end_turn`. `admits` is only necessary while a user is throttled.

    Attributes:
      throttled: The user whose messages are dropped; None if there is none.
      flooder: The user to shut out, found in this turn; None if there is none.
    """

    def __init__(self, quotas: Quotas) -> None:
        """Start with empty counts; `quotas` contains the weight of each user."""
        self.throttled: str | None = None
        self.flooder: str | None = None
        self._quotas = quotas
        # Decaying counts by user: seconds of loop time, and seconds without steps.
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._non_step_seconds: defaultdict[str, float] = defaultdict(float)
        # Decaying number of turns that left messages unread, by the last sender.
        self._unread: defaultdict[str, float] = defaultdict(float)
        # Dropped messages and bytes by user, as a fraction of the limits of a flood.
        self._dropped: defaultdict[str, float] = defaultdict(float)
        self._updated_at = 0.0
        # Since this time, every turn has ended with unread messages; infinity if the
        # last turn did not.
        self._backlog_since = math.inf
        # State of the current turn: the last reading of the clock, the time at which
        # the turn ends, the user who was charged last, whether a message was dropped,
        # and the first peer whose dropped message counts; see `admits`.
        self._now = self._turn_ends_at = 0.0
        self._user = ""
        self._is_step = self._has_dropped = False
        self._first_dropped: Peer | None = None

    def begin_turn(self, now: float) -> None:
        """Begin a turn, in which messages are read until `charge` returns True."""
        self._now, self._turn_ends_at = now, now + _TURN_SECONDS
        self._first_dropped = self.flooder = None
        self._has_dropped = False

    def admits(self, peer: Peer, num_bytes: int) -> bool:
        """Return whether to handle a message; False if it must be dropped."""
        user: str = peer[-1]
        if user != self.throttled:
            self._first_dropped = None
            return True
        self.record_dropped(user, 1, num_bytes)
        # ZeroMQ reads its peers in turn. When a peer whose message was dropped appears
        # again, without a message from another user in between, only this user's
        # messages are left. The first dropped message of a turn does not count, because
        # ZeroMQ may have read it during the last turn, before other users sent theirs.
        if self._first_dropped == peer:
            self._turn_ends_at = 0.0
        elif self._first_dropped is None and self._has_dropped:
            self._first_dropped = peer
        self._has_dropped = True
        return False

    def record_dropped(self, user: str, num_messages: int, num_bytes: int) -> None:
        """Count dropped messages; their number is 0 if the bytes are not a message."""
        if user not in KEYLESS_USERS:  # users without a key cannot be shut out
            part = num_messages / _FLOOD_MESSAGES + num_bytes / _FLOOD_BYTES
            self._dropped[user] += part

    def charge(self, now: float, user: str, *, is_step: bool = False) -> bool:
        """Charge the time since the last call to a user.

        Args:
          now: Current time.
          user: The user to charge, usually the sender of the latest message.
          is_step: Whether the message has started a step; duplicates do not.

        Returns:
          Whether the turn is over.
        """
        self._user = user
        seconds = now - self._now
        self._now = now
        self._is_step = is_step
        self._seconds[user] += seconds
        if not is_step:
            self._non_step_seconds[user] += seconds
        return now >= self._turn_ends_at

    def end_turn(self, has_unread: bool) -> float:
        """End a turn; return the seconds to pause reading.

        Update `throttled` and `flooder` every `_UPDATE_SECONDS`.
        """
        if has_unread:
            self._backlog_since = min(self._backlog_since, self._now)
            if not self._is_step:
                self._unread[self._user] += 1.0
        else:
            self._backlog_since, self.throttled = math.inf, None
        if self._now >= self._updated_at + _UPDATE_SECONDS:
            self._update(self._now)
        return _PAUSE_SECONDS if has_unread and self.throttled is not None else 0.0

    def _update(self, now: float) -> None:
        decay = math.exp((self._updated_at - now) / _DECAY_SECONDS)
        self._updated_at = now
        flooder = next((u for u, share in self._dropped.items() if share > 1), None)
        if flooder is not None:
            self.flooder = flooder
            del self._dropped[flooder]  # so that it is reported only once
        for counts in (
            self._seconds,
            self._non_step_seconds,
            self._unread,
            self._dropped,
        ):
            for user in list(counts):
                counts[user] *= decay
                if counts[user] < _NEGLIGIBLE:
                    del counts[user]
        self.throttled = None
        has_backlog = now >= self._backlog_since + _BACKLOG_SECONDS
        if not (has_backlog and self._unread) or len(self._seconds) < 2:
            return
        user = max(self._unread, key=self._unread.__getitem__)
        weight_of = self._quotas.weight_of
        used = {u: seconds / weight_of(u) for u, seconds in self._seconds.items()}
        non_step_seconds = self._non_step_seconds.get(user, 0.0) / weight_of(user)
        used.pop(user, 0.0)
        limit = _MAX_RELATIVE_SECONDS * sum(used.values()) / len(used)
        if non_step_seconds > max(_FREE_SECONDS, limit):
            self.throttled = user
