"""Shares of the loop: who floods is dropped while others wait, and nobody else ever."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from envserve.keys.grant import Grant
from envserve.server.fair_share import FairShare
from envserve.session.server.quotas import Quotas
from envserve.settings import HostSettings

COST = 1e-4


def make_shares(weight: float) -> FairShare:
    """Gives mallory so many times the share of others."""
    grants = {"mallory": Grant(name="mallory", public=bytes(32), share=weight)}
    return FairShare(Quotas(HostSettings(), grants.get))


@dataclass
class Loop:
    """A loop in virtual time, whose turns end after so many messages or seconds."""

    shares: FairShare = field(default_factory=lambda: make_shares(1.0))
    now: float = 100.0
    handled: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)
    steppers: frozenset[str] = frozenset()

    def turn(
        self, users: list[str], cost: Callable[[str], float], due: float
    ) -> list[str]:
        """Reads until the turn is over; returns what is left unread.

        It does not read on at once if told so, unless an honest message is due.
        """
        is_over = False
        self.shares.begin_turn(self.now)
        while users and not is_over:
            user, *users = users
            is_admitted = self.shares.admits((1, b"r", user), 100)
            self.now += cost(user) if is_admitted else COST / 10
            is_over = self.shares.charge(self.now, is_step=user in self.steppers)
            kept = self.handled if is_admitted else self.dropped
            kept[user] = kept.get(user, 0) + 1
        pause = self.shares.end_turn(is_drained=not users)
        self.now = max(self.now + 1e-5, min(self.now + pause, due))
        return users

    def run(
        self,
        seconds: float,
        flooders: tuple[str, ...],
        honest: dict[str, int],
        cost: Callable[[str], float] = lambda user: COST,
        pace: float = 1e-3,
    ) -> None:
        """Lets some flood, and others send so many messages at a pace."""
        until, due = self.now + seconds, self.now
        unread: list[str] = []
        while self.now < until:
            if self.now >= due:
                due = self.now + pace
                unread += [user for user, n in honest.items() for _ in range(n)]
            names = itertools.islice(itertools.cycle(flooders), 250)
            read_by_turns = itertools.zip_longest(unread, names)
            mixed = [user for pair in read_by_turns for user in pair if user]
            left = self.turn(mixed, cost, due)
            unread = [user for user in left if user not in flooders]
            if not left:
                self.now = max(self.now, due)


def test_who_floods_alone_is_served() -> None:
    loop = Loop()
    loop.run(3.0, ("mallory",), {})
    assert not loop.dropped


def test_who_floods_while_another_waits_is_dropped_but_for_a_small_share() -> None:
    loop = Loop()
    loop.run(1.0, ("mallory",), {"ann": 1})
    assert loop.shares.throttled == "mallory"
    before = dict(loop.handled)
    loop.run(3.0, ("mallory",), {"ann": 1})
    assert loop.dropped.keys() == {"mallory"}
    used = COST * (loop.handled["mallory"] - before["mallory"])
    assert used < 0.2 * 3.0
    assert loop.handled["ann"] - before["ann"] > 0.4 * 3.0 / 1e-3


def test_a_few_long_messages_weigh_as_much_as_many_short_ones() -> None:
    loop = Loop()
    loop.run(
        3.0, ("mallory",), {"ann": 1}, lambda user: 2e-3 if user != "ann" else COST
    )
    assert loop.dropped.keys() == {"mallory"}
    assert loop.handled["mallory"] * 2e-3 < 1.0


def test_who_waits_for_answers_is_never_dropped_however_much_it_uses() -> None:
    """Nothing of its own stands in the queue."""
    loop = Loop()
    costs = {"ann": 5e-3, "bob": COST}
    loop.run(3.0, (), {"ann": 1, "bob": 1}, costs.__getitem__, pace=7e-3)
    assert not loop.dropped
    assert loop.handled["ann"] > 300


def test_a_turn_that_took_long_after_a_lull_is_no_queue() -> None:
    """Another process may have had the core in between."""
    loop = Loop()
    loop.run(1.0, (), {"ann": 8, "bob": 1}, pace=5e-3)
    for _ in range(100):
        loop.now += 0.5
        loop.turn(["ann", "bob"], lambda user: 5e-3, math.inf)
        assert loop.shares.throttled is None
        loop.turn(["bob"], lambda user: COST, math.inf)


def test_steps_of_hundreds_of_blocks_are_no_flood() -> None:
    """All of them may stand in the queue: each is the only one of its block."""
    loop = Loop(steppers=frozenset({"ann", "bob"}))
    loop.run(3.0, ("ann",), {"bob": 1})
    assert not loop.dropped


def test_steps_of_hundreds_of_blocks_hide_no_flood() -> None:
    loop = Loop(steppers=frozenset({"ann", "bob"}))
    cost = {"mallory": 4 * COST}
    loop.run(3.0, ("ann", "mallory"), {"bob": 1}, lambda user: cost.get(user, COST))
    assert loop.dropped.keys() == {"mallory"}


def test_frames_that_are_thrown_away_are_charged_to_their_sender() -> None:
    shares, now = make_shares(1.0), 100.0
    for _ in range(200):
        shares.begin_turn(now)
        shares.admits((1, b"a", "ann"), 100)
        shares.charge(now := now + COST)
        shares.charge(now := now + 2e-3, "mallory")
        shares.end_turn(is_drained=False)
    assert shares.throttled == "mallory"


@pytest.mark.parametrize(
    ("user", "count", "num_bytes", "is_flood"),
    [
        ("mallory", 5_100, 44, True),
        ("mallory", 70, 1 << 20, True),
        ("mallory", 4_000, 44, False),  # thousands of lanes, once a second
        ("local", 9_000, 44, False),  # has no key
        ("", 9_000, 44, False),
    ],
)
def test_who_goes_on_as_if_nothing_were_dropped_is_to_be_shut_out(
    user: str, count: int, num_bytes: int, is_flood: bool
) -> None:
    shares = make_shares(1.0)
    shares.throttled = user
    shares.begin_turn(100.0)
    for _ in range(count):
        assert not shares.admits((1, b"r", user), num_bytes)
    shares.charge(100.02, user)
    shares.end_turn(is_drained=False)
    assert shares.flooder == (user if is_flood else None)


@pytest.mark.parametrize(("num_bytes", "is_flood"), [(100, False), (1 << 14, True)])
def test_what_is_no_message_counts_by_its_bytes_alone(
    num_bytes: int, is_flood: bool
) -> None:
    shares = make_shares(1.0)
    shares.begin_turn(100.0)
    for _ in range(10_000):
        assert shares.admits((1, b"r", "mallory"), num_bytes)
        shares.record_dropped(0, num_bytes)
    shares.charge(100.02)
    shares.end_turn(is_drained=False)
    assert (shares.flooder == "mallory") is is_flood


def test_many_equal_users_of_a_busy_loop_are_not_dropped() -> None:
    loop = Loop()
    names = {f"user-{index}": 1 for index in range(20)}
    loop.run(3.0, (), names, lambda user: 3e-4, pace=7e-3)
    assert not loop.dropped


def test_a_flood_that_has_ended_is_forgiven() -> None:
    loop = Loop()
    loop.run(1.0, ("mallory",), {"ann": 1})
    assert loop.dropped["mallory"]
    loop.run(0.1, (), {"ann": 1, "mallory": 1})
    assert loop.shares.throttled is None
    dropped = loop.dropped["mallory"]
    loop.run(1.0, (), {"ann": 1, "mallory": 1})
    assert loop.dropped["mallory"] == dropped


def test_a_share_can_be_larger() -> None:
    used = {}
    for weight in (1.0, 4.0):
        loop = Loop(make_shares(weight))
        loop.run(4.0, ("mallory",), {"ann": 2})
        used[weight] = loop.handled["mallory"]
    assert used[4.0] > 2 * used[1.0]
