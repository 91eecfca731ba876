"""Lanes are spread evenly again after every kind of outage, in virtual time.

The tests simulate servers and lanes in steps of half a second. Each lane behaves like a
session: it returns to its own server if that is back, and otherwise asks for another.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from envserve.client.link.connection import NO_ADDRESS
from envserve.client.link.placement import SHARE_SECONDS, Placement

TICK_SECONDS = 0.5
#: Pause between two polls, as in `ServerPool`.
POLL_SECONDS = 1.0
SPREAD_POLL_SECONDS = 10.0
NUM_ENVS = 4


@dataclass
class Server:
    """A server; a new boot id means that its envs are gone."""

    room: int = 16
    is_up: bool = True
    is_listed: bool = True
    is_draining: bool = False
    boot: int = 0
    rejects: bool = False  # all leases, although it reports free envs


@dataclass
class World:
    """Servers by address, and the lanes of a batch with the boot of their lease."""

    servers: dict[str, Server]
    placement: Placement = field(default_factory=Placement)
    leases: dict[str, tuple[str, int] | None] = field(default_factory=dict)
    silent_since: dict[str, float] = field(default_factory=dict)
    now: float = 0.0
    polled_at: float = 0.0
    num_moves: int = 0
    moved_at: list[float] = field(default_factory=list)
    rejected_at: list[float] = field(default_factory=list)

    def connect(self, num_lanes: int) -> None:
        """Start lanes on the first servers, and vacant ones for missing servers."""
        listed = [at for at, server in self.servers.items() if server.is_listed]
        for number in range(num_lanes):
            lane = f"lane {number}"
            at = listed[number] if number < len(listed) else NO_ADDRESS
            self.placement.add(lane, at, NUM_ENVS)
            self.leases[lane] = (at, 0) if at in self.servers else None

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_SECONDS
            is_searching = False
            for lane in self.leases:
                is_searching |= not self._has_lease(lane)
            pause = POLL_SECONDS if is_searching else SPREAD_POLL_SECONDS
            if self.now % pause == 0:
                self._poll()
            for lane in self.leases:
                self._run_lane(lane)
            self.placement.spread(self.now)

    def _has_lease(self, lane: str) -> bool:
        at, boot = self.leases[lane] or ("", 0)
        server = self.servers.get(at)
        return server is not None and server.is_up and server.boot == boot

    def _run_lane(self, lane: str) -> None:
        if self._has_lease(lane):
            self.placement.end_search(lane)
            self.silent_since.pop(lane, None)
            if lane in self.placement.targets and self.now % 5 == 0:  # episodes end
                target = self.servers[self.placement.targets[lane]]
                if target.rejects:
                    self.rejected_at.append(self.now)
                    self.placement.record_rejection(lane, self.now)
                else:
                    self.moved_at.append(self.now)
                    self._attach(lane, self.placement.move(lane))
            return
        at = self.placement.locations[lane]
        own = self.servers.get(at)
        if own is not None and own.is_up and not (own.is_draining or own.rejects):
            self._attach(lane, at)
            return
        since = self.silent_since.setdefault(lane, self.now)
        may_recover = own is not None and own.is_listed and own.boot == 0
        if self.polled_at < since or (may_recover and self.now < since + 5.0):
            return
        found = self.placement.assign(
            lane,
            self.now,
            may_recover=may_recover,
            is_ungranted=own is not None and own.rejects,
        )
        if found is not None:
            self._attach(lane, found)

    def _attach(self, lane: str, at: str) -> None:
        server = self.servers[at]
        self.num_moves += 1
        self.leases[lane] = None
        if server.is_up and self._num_free(at) >= NUM_ENVS and not server.rejects:
            self.leases[lane] = at, server.boot
            self.placement.end_search(lane)

    def _num_free(self, at: str) -> int:
        used = sum(
            lease == (at, self.servers[at].boot) for lease in self.leases.values()
        )
        return self.servers[at].room - NUM_ENVS * used

    def _poll(self) -> None:
        self.polled_at = self.now
        self.placement.num_free = {
            at: self._num_free(at)
            for at, server in self.servers.items()
            if server.is_up and server.is_listed and not server.is_draining
        }

    def kill(self, at: str) -> None:
        self.servers[at].is_up = False

    def start(self, at: str) -> None:
        server = self.servers[at]
        server.is_up, server.boot = True, server.boot + 1

    def lanes(self) -> list[int]:
        """Return the numbers of lanes per server, the highest first."""
        assert all(self._has_lease(lane) for lane in self.leases)
        counts = Counter(
            at for lease in self.leases.values() if lease for at in [lease[0]]
        )
        ready = [
            at for at, each in self.servers.items() if each.is_up and each.is_listed
        ]
        return sorted((counts[at] for at in ready), reverse=True)


def make_world(num_servers: int, num_lanes: int = 0, room: int = 16) -> World:
    world = World({f"server {n}": Server(room) for n in range(num_servers)})
    world.connect(num_lanes or num_servers)
    world.run(3)
    assert world.num_moves == 0 or num_lanes
    return world


def test_after_a_common_outage_lanes_wait_for_their_own_servers() -> None:
    world = make_world(4)
    for at in world.servers:
        world.kill(at)
    world.run(45)
    for at in world.servers:
        world.start(at)
        world.run(1)
    world.run(3)
    assert world.lanes() == [1, 1, 1, 1]
    assert world.num_moves == 4


def test_lanes_share_a_server_if_the_others_stay_away_and_spread_later() -> None:
    world = make_world(4)
    for at in world.servers:
        world.kill(at)
    world.run(45)
    world.start("server 2")
    world.run(SHARE_SECONDS + 3)
    assert world.lanes() == [4]
    for at in ("server 0", "server 1", "server 3"):
        world.start(at)
    world.run(40)
    assert world.lanes() == [1, 1, 1, 1]


def test_a_single_lost_lane_does_not_wait_to_share_a_server() -> None:
    world = make_world(4)
    world.kill("server 1")
    world.servers["server 1"].boot = 1
    world.run(2)
    assert world.lanes() == [2, 1, 1]
    world.start("server 1")
    world.run(30)
    assert world.lanes() == [1, 1, 1, 1]


def replace(world: World, old: str, new: str, *, has_surge: bool) -> None:
    """Drain a server, and list its replacement before that or after it has ended."""
    if has_surge:
        world.servers[new] = Server(world.servers[old].room)
        world.run(2)
    world.servers[old].is_draining = True
    world.run(4)
    world.servers[old].is_up = world.servers[old].is_listed = False
    world.servers[old].boot += 1
    world.run(2)
    if not has_surge:
        world.servers[new] = Server(world.servers[old].room)
        world.run(2)


def test_lanes_are_even_after_a_rolling_replacement() -> None:
    for num_servers, room in ((4, 16), (8, 16)):
        for has_surge in (False, True):
            world = make_world(num_servers, room=room)
            for number in range(num_servers):
                old, new = f"server {number}", f"new {number}"
                replace(world, old, new, has_surge=has_surge)
            world.run(60)
            assert world.lanes() == [1] * num_servers
            if has_surge:  # each lane moves once
                assert world.num_moves == num_servers


def test_lanes_are_even_after_a_partition_has_healed() -> None:
    world = make_world(4)
    world.kill("server 3")
    world.run(4)
    assert world.placement.locations["lane 3"] == "server 3"
    world.run(4)
    assert world.lanes() == [2, 1, 1]
    world.run(54)
    world.servers["server 3"].is_up = True
    world.run(30)
    assert world.lanes() == [1, 1, 1, 1]


def test_an_added_server_takes_its_share_within_a_minute() -> None:
    """A batch with more lanes than servers shares them, and uses later ones."""
    world = make_world(4, num_lanes=8)
    world.run(10)
    assert world.lanes() == [2, 2, 2, 2]
    for number in range(4, 6):
        world.servers[f"server {number}"] = Server()
    world.run(60)
    assert world.lanes() == [2, 2, 1, 1, 1, 1]
    before = world.num_moves
    world.run(60)
    assert world.num_moves == before  # nothing is gained by further moves


def test_a_lane_that_is_about_to_give_up_shares_a_server_at_once() -> None:
    placement = Placement()
    for lane in ("a", "b", "c"):
        placement.add(lane, f"server of {lane}", NUM_ENVS)
    placement.num_free = {"server of c": 8}
    assert placement.assign("a", 1.0, may_recover=True) == "server of c"
    assert placement.assign("b", 2.0, may_recover=True) is None
    assert placement.assign("b", 2.0, may_recover=True, is_urgent=True) == "server of c"


def test_lanes_do_not_move_to_a_server_that_has_rejected_one() -> None:
    placement = Placement()
    for lane in ("a", "b"):
        placement.add(lane, NO_ADDRESS, NUM_ENVS)
        placement.locations[lane] = "good"
    placement.add("c", "bad", NUM_ENVS)
    placement.exclude("c", now=0.0)
    placement.remove("c")
    for now in (1.0, 3600.0):
        placement.num_free = {"good": 8, "bad": 8}
        placement.spread(now)
        assert not placement.targets
    placement.num_free |= {"new": 8}
    placement.spread(7200.0)
    assert [*placement.targets.values()] == ["new"]


def test_lanes_move_one_at_a_time_and_only_where_there_are_free_envs() -> None:
    world = make_world(1, num_lanes=4)
    world.run(10)
    world.servers["full"] = Server(room=NUM_ENVS - 1)
    world.servers["small"] = Server(room=NUM_ENVS)
    world.servers["large"] = Server(room=16)
    world.run(60)
    assert world.lanes() == [2, 1, 1, 0]
    assert len(world.moved_at) == 2
    world.servers["full"].room = NUM_ENVS
    world.run(60)
    assert world.lanes() == [1, 1, 1, 1]


def test_lanes_try_a_server_that_rejects_them_less_and_less_often() -> None:
    world = make_world(2)
    world.kill("server 1")
    world.run(10)
    assert world.lanes() == [2]
    world.start("server 1")
    world.servers["server 1"].rejects = True
    world.run(1800)
    assert 2 <= len(world.rejected_at) <= 7
    assert not world.moved_at
    assert world.lanes() == [2, 0]
    world.servers["server 1"].rejects = False
    world.run(1800)
    assert world.lanes() == [1, 1]


def test_servers_listed_several_times_keep_their_lanes() -> None:
    placement = Placement()
    for lane, at in zip("abcd", ("first", "first", "first", "other"), strict=True):
        placement.add(lane, at, NUM_ENVS)
    placement.num_free = {"first": 8, "other": 8}
    placement.spread(10.0)
    assert not placement.targets
