"""Decides which server each lane of a batch uses, without I/O.

A lane that has lost its server gets another one with free envs, preferably one that no
other lane of the batch uses. If several lanes are without a server, they wait a few
seconds before two of them share one, because their previous servers may recover. While
the lanes are spread unevenly, they move one at a time to servers with fewer lanes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

from envserve.client.link.connection import NO_ADDRESS

#: Time for which a server is excluded after it rejected a lane or had different envs.
EXCLUDE_SECONDS: Final = 60.0
#: Time that lanes wait before they share a suitable server, because other servers may
#: recover. Applies to lanes without a server, and to lanes that have lost their servers
#: at the same time.
SHARE_SECONDS: Final = 5.0
#: After a lane has left a server that was silent or rejected the lane, lanes that have
#: another server do not move there for this time. The time doubles with each
#: repetition, so that an unreliable server ends few episodes.
AVOID_SECONDS: Final = 30.0
_MAX_DOUBLINGS: Final = 6
#: Pause between two moves that only spread the lanes.
SPREAD_SECONDS: Final = 1.0


class Placement:
    """The servers of the lanes of a batch. Times are monotonic seconds.

    Attributes:
      locations: Current server of each lane.
      num_free: Number of free envs of each ready server, if known.
      targets: Server to which a lane is to move once its episodes have ended, by lane.
    """

    def __init__(self) -> None:
        self.locations: dict[object, str] = {}
        self.num_free: dict[str, int] = {}
        self.targets: dict[object, str] = {}
        self._sizes: dict[object, int] = {}
        #: Maps lanes that need another server to the time since which a suitable server
        #: has been available.
        self._searching: dict[object, float] = {}
        #: Lanes that have lost their servers at the same time as another lane.
        self._lost_together: set[object] = set()
        #: Time until which each server is excluded. Lanes with a server do not move to
        #: these servers even after that time.
        self._excluded_until: dict[str, float] = {}
        self._avoided_until: dict[str, float] = {}
        self._num_avoided: Counter[str] = Counter()
        #: First server of each lane. `spread` does not move a lane away from this
        #: server, because the user may have listed the server several times on purpose.
        self._first_servers: dict[object, str] = {}
        self._next_spread_at = 0.0

    def add(self, lane: object, address: str, num_envs: int) -> None:
        """Add a lane and the address of its server, or `NO_ADDRESS`."""
        self.locations[lane] = self._first_servers[lane] = address
        self._sizes[lane] = num_envs

    def exclude(self, lane: object, now: float) -> None:
        """Exclude a lane's server for a minute, and leave the lane without a server."""
        self._excluded_until[self.locations[lane]] = now + EXCLUDE_SECONDS
        self.locations[lane] = NO_ADDRESS

    def end_search(self, lane: object) -> None:
        """Record that a lane no longer needs a different server."""
        self._searching.pop(lane, None)
        self._lost_together.discard(lane)

    def remove(self, lane: object) -> None:
        """Remove a lane."""
        self.end_search(lane)
        for each in (self.locations, self.targets, self._sizes, self._first_servers):
            each.pop(lane, None)

    def assign(
        self,
        lane: object,
        now: float,
        *,
        may_recover: bool,
        is_ungranted: bool = False,
        is_urgent: bool = False,
    ) -> str | None:
        """Assign another server with enough free envs to a lane that needs one.

        Args:
          lane: The lane.
          now: The current time.
          may_recover: Whether the lane's server may still hold the lane's envs.
          is_ungranted: Whether the lane's server has never granted it envs.
          is_urgent: Whether the lane cannot wait, because it is about to give up.

        Returns:
          The address of the server; None if there is none yet.
        """
        self.targets.pop(lane, None)
        found = self._best_server(lane, now)
        is_vacant = self.locations[lane] == NO_ADDRESS
        since = now if found is None else self._searching.get(lane, now)
        self._searching[lane] = since
        lost = {each for each in self._searching if self.locations[each] != NO_ADDRESS}
        if len(lost) > 1:
            self._lost_together |= lost
        if found is None:
            return None
        num_lanes, address = found
        is_together = lane in self._lost_together
        if may_recover or num_lanes > 0:
            must_wait = (is_together or is_vacant) and not is_urgent
            if must_wait and now < since + SHARE_SECONDS:
                return None
        if may_recover or is_ungranted:
            self._avoid(self.locations[lane], now)
        self.num_free[address] -= self._sizes[lane]
        self.locations[lane] = address
        return address

    def _avoid(self, address: str, now: float) -> None:
        if now >= self._avoided_until.get(address, now):
            num_doublings = min(self._num_avoided[address], _MAX_DOUBLINGS)
            self._avoided_until[address] = now + AVOID_SECONDS * 2**num_doublings
            self._num_avoided[address] += 1

    def spread(self, now: float) -> None:
        """If lanes are spread unevenly, set the target of one lane."""
        if now < self._next_spread_at:
            return
        self._next_spread_at = now + SPREAD_SECONDS
        avoided = [
            address for address, until in self._avoided_until.items() if now < until
        ]
        counts = self.num_lanes()
        excluded = {*self._excluded_until, *self.targets.values(), *avoided}
        for lane in sorted(
            self.locations, key=lambda each: -counts[self.locations[each]]
        ):
            if counts[self.locations[lane]] < 2:
                return
            is_first_server = self.locations[lane] == self._first_servers[lane]
            if is_first_server or lane in self.targets or lane in self._searching:
                continue
            found = self._best_server(lane, now, excluded)
            if found and found[0] + 2 <= counts[self.locations[lane]]:
                self.targets[lane] = found[1]
                self.num_free[found[1]] -= self._sizes[lane]
                return

    def record_rejection(self, lane: object, now: float) -> None:
        """Record that a lane's target has not granted it envs; keep its server."""
        self._avoid(self.targets.pop(lane), now)

    def move(self, lane: object) -> str:
        """Record that a lane moves to its target now; return its address."""
        self.locations[lane] = self.targets.pop(lane)
        return self.locations[lane]

    def num_lanes(self) -> Counter[str]:
        """Return the number of lanes per server; lanes with a target count for it."""
        counts = Counter({**self.locations, **self.targets}.values())
        del counts[NO_ADDRESS]
        return counts

    def _best_server(
        self, lane: object, now: float, excluded: Collection[str] = ()
    ) -> tuple[int, str] | None:
        """Return the number of lanes and the address of the best other server.

        It has the fewest lanes and, among such servers, the most free envs. Return None
        if no server that is not in `excluded` has enough free envs for the lane.
        """
        counts, current = self.num_lanes(), self.locations[lane]
        candidates = [
            (counts[address], -num_free, address)
            for address, num_free in self.num_free.items()
            if num_free >= self._sizes[lane]
            and address != current
            and address not in excluded
            and now >= self._excluded_until.get(address, now)
        ]
        if not candidates:
            return None
        num_lanes, _, address = min(candidates)
        return num_lanes, address
