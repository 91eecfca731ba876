"""Fair shares of the event loop: only flooders' messages are dropped."""

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
    """Create a FairShare in which mallory's key has this share; others have 1."""
    grants = {"mallory": Grant(name="mallory", public=bytes(32), share=weight)}
    return FairShare(Quotas(HostSettings(), grants.get))


@dataclass
class Loop:
    """A simulated event loop that reads messages in virtual time."""

    shares: FairShare = field(default_factory=lambda: make_shares(1.0))
    now: float = 100.0
    handled: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)
    steppers: frozenset[str] = frozenset()

    def turn(
        self, users: list[str], cost: Callable[[str], float], due: float
    ) -> list[str]:
        """Read until the turn is over; return the users of the unread messages.

        After a throttled turn, pause as requested, but not beyond time `due`, when the
        next honest message arrives.
        """
        is_over = False
        self.shares.begin_turn(self.now)
        while users and not is_over:
            user, *users = users
            is_admitted = self.shares.admits((1, b"r", user), 100)
            self.now += cost(user) if is_admitted else COST / 10
            is_over = self.shares.charge(self.now, is_step=user in self.steppers)
            counts = self.handled if is_admitted else self.dropped
            counts[user] = counts.get(user, 0) + 1
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
        """Simulate flooders and honest users.

        Args:
          seconds: Virtual duration.
          flooders: Users whose messages never end.
          honest: Messages that each honest user sends every `pace` seconds.
          cost: Returns the seconds that a message of a user takes.
          pace: Seconds between two rounds of honest messages.
        """
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


def test_a_flooder_is_served_if_no_other_user_waits() -> None:
    loop = Loop()
    loop.run(3.0, ("mallory",), {})
    assert not loop.dropped


def test_a_flooder_keeps_a_small_share_while_another_user_waits() -> None:
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


def test_a_client_that_waits_for_answers_is_never_dropped() -> None:
    """It leaves no messages unread, however much time they take."""
    loop = Loop()
    costs = {"ann": 5e-3, "bob": COST}
    loop.run(3.0, (), {"ann": 1, "bob": 1}, costs.__getitem__, pace=7e-3)
    assert not loop.dropped
    assert loop.handled["ann"] > 300


def test_a_long_turn_after_an_idle_time_is_no_backlog() -> None:
    """Another process may have used the core in between."""
    loop = Loop()
    loop.run(1.0, (), {"ann": 8, "bob": 1}, pace=5e-3)
    for _ in range(100):
        loop.now += 0.5
        loop.turn(["ann", "bob"], lambda user: 5e-3, math.inf)
        assert loop.shares.throttled is None
        loop.turn(["bob"], lambda user: COST, math.inf)


def test_steps_of_hundreds_of_blocks_are_not_a_flood() -> None:
    """All of them may be unread, because each block has one step in flight."""
    loop = Loop(steppers=frozenset({"ann", "bob"}))
    loop.run(3.0, ("ann",), {"bob": 1})
    assert not loop.dropped


def test_steps_of_hundreds_of_blocks_do_not_hide_a_flood() -> None:
    loop = Loop(steppers=frozenset({"ann", "bob"}))
    cost = {"mallory": 4 * COST}
    loop.run(3.0, ("ann", "mallory"), {"bob": 1}, lambda user: cost.get(user, COST))
    assert loop.dropped.keys() == {"mallory"}


def test_discarded_frames_are_charged_to_their_sender() -> None:
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
        ("mallory", 4_000, 44, False),  # thousands of lanes that resend once a second
        ("local", 9_000, 44, False),  # without a key to shut out
        ("", 9_000, 44, False),
    ],
)
def test_a_user_who_continues_to_flood_is_shut_out(
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
def test_invalid_messages_count_by_their_bytes_only(
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


def test_many_equal_users_of_a_busy_loop_are_not_throttled() -> None:
    loop = Loop()
    names = {f"user-{index}": 1 for index in range(20)}
    loop.run(3.0, (), names, lambda user: 3e-4, pace=7e-3)
    assert not loop.dropped


def test_a_user_is_not_throttled_after_its_flood_has_ended() -> None:
    loop = Loop()
    loop.run(1.0, ("mallory",), {"ann": 1})
    assert loop.dropped["mallory"]
    loop.run(0.1, (), {"ann": 1, "mallory": 1})
    assert loop.shares.throttled is None
    dropped = loop.dropped["mallory"]
    loop.run(1.0, (), {"ann": 1, "mallory": 1})
    assert loop.dropped["mallory"] == dropped


def test_a_larger_share_allows_more_messages() -> None:
    used = {}
    for weight in (1.0, 4.0):
        loop = Loop(make_shares(weight))
        loop.run(4.0, ("mallory",), {"ann": 2})
        used[weight] = loop.handled["mallory"]
    assert used[4.0] > 2 * used[1.0]
