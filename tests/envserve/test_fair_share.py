"""Fair shares of the event loop: only messages of users that flood it are dropped."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import zmq

from envserve.keys.grant import Grant
from envserve.server.fair_share import FairShare
from envserve.session.server.quotas import Quotas
from envserve.settings import HostSettings
from envserve.wire.sockets import FrameReceiver

COST = 1e-4


def make_fair_share(weight: float) -> FairShare:
    """Create a `FairShare` with a weight for mallory."""
    grants = {"mallory": Grant(name="mallory", public=bytes(32), share=weight)}
    return FairShare(Quotas(HostSettings(), grants.get))


@dataclass
class Loop:
    """An event loop in virtual time; `FairShare` limits its turns."""

    fair_share: FairShare = field(default_factory=lambda: make_fair_share(1.0))
    now: float = 100.0
    handled: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, float] = field(default_factory=dict)
    users_that_step: frozenset[str] = frozenset()

    def turn(
        self, users: list[str], cost: Callable[[str], float], due: float
    ) -> list[str]:
        """Handle messages for one turn; return the users with unread messages.

        Args:
          users: Senders of the messages, in order.
          cost: Seconds to handle a message from a user.
          due: Time of the next honest message, which ends the pause after the turn.
        """
        is_over = False
        self.fair_share.begin_turn(self.now)
        while users and not is_over:
            user, *users = users
            is_admitted = self.fair_share.admits((1, b"r", user), 100)
            self.now += cost(user) if is_admitted else COST / 10
            is_over = self.fair_share.charge(
                self.now, user, is_step=user in self.users_that_step
            )
            counter = self.handled if is_admitted else self.dropped
            counter[user] = counter.get(user, 0) + 1
        pause = self.fair_share.end_turn(has_unread=bool(users))
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
        """Run with users that flood the loop and users that send at a fixed pace.

        Args:
          seconds: Duration of the run.
          flooders: Users whose messages always fill a turn.
          honest: Number of messages per `pace` from each other user.
          cost: Seconds to handle a message from a user.
          pace: Seconds between two bursts of honest messages.
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


def test_a_flood_without_other_users_is_handled() -> None:
    loop = Loop()
    loop.run(3.0, ("mallory",), {})
    assert not loop.dropped


def test_a_flood_is_dropped_except_for_a_small_share_while_another_user_waits() -> None:
    loop = Loop()
    loop.run(1.0, ("mallory",), {"ann": 1})
    assert loop.fair_share.throttled == "mallory"
    before = dict(loop.handled)
    loop.run(3.0, ("mallory",), {"ann": 1})
    assert loop.dropped.keys() == {"mallory"}
    used = COST * (loop.handled["mallory"] - before["mallory"])
    assert used < 0.2 * 3.0
    assert loop.handled["ann"] - before["ann"] > 0.4 * 3.0 / 1e-3


def test_messages_count_by_their_processing_time() -> None:
    loop = Loop()
    loop.run(
        3.0, ("mallory",), {"ann": 1}, lambda user: 2e-3 if user != "ann" else COST
    )
    assert loop.dropped.keys() == {"mallory"}
    assert loop.handled["mallory"] * 2e-3 < 1.0


def test_a_user_that_waits_for_replies_is_not_dropped() -> None:
    """Such a user's messages do not queue up, however long they take to handle."""
    loop = Loop()
    costs = {"ann": 5e-3, "bob": COST}
    loop.run(3.0, (), {"ann": 1, "bob": 1}, costs.__getitem__, pace=7e-3)
    assert not loop.dropped
    assert loop.handled["ann"] > 300


def test_a_slow_turn_after_idle_time_is_not_congestion() -> None:
    """Another process may have used the CPU core in the meantime."""
    loop = Loop()
    loop.run(1.0, (), {"ann": 8, "bob": 1}, pace=5e-3)
    for _ in range(100):
        loop.now += 0.5
        loop.turn(["ann", "bob"], lambda user: 5e-3, math.inf)
        assert loop.fair_share.throttled is None
        loop.turn(["bob"], lambda user: COST, math.inf)


def test_steps_of_hundreds_of_blocks_are_not_a_flood() -> None:
    """Hundreds of messages may be queued, one from each block."""
    loop = Loop(users_that_step=frozenset({"ann", "bob"}))
    loop.run(3.0, ("ann",), {"bob": 1})
    assert not loop.dropped


def test_steps_of_hundreds_of_blocks_do_not_hide_a_flood() -> None:
    loop = Loop(users_that_step=frozenset({"ann", "bob"}))
    cost = {"mallory": 4 * COST}
    loop.run(3.0, ("ann", "mallory"), {"bob": 1}, lambda user: cost.get(user, COST))
    assert loop.dropped.keys() == {"mallory"}


@pytest.mark.parametrize("user", ["mallory", ""])
def test_time_spent_on_dropped_frames_is_charged_to_their_sender(user: str) -> None:
    fair_share, now = make_fair_share(1.0), 100.0
    for _ in range(200):
        fair_share.begin_turn(now)
        fair_share.admits((1, b"a", "ann"), 100)
        fair_share.charge(now := now + COST, "ann")
        fair_share.charge(now := now + 2e-3, user)
        fair_share.end_turn(has_unread=True)
    assert fair_share.throttled == user


@pytest.mark.parametrize(
    ("user", "count", "num_bytes", "is_flood"),
    [
        ("mallory", 5_100, 44, True),
        ("mallory", 70, 1 << 20, True),
        # Like thousands of lanes, each of which resends once a second.
        ("mallory", 4_000, 44, False),
        ("local", 9_000, 44, False),  # without a key
        ("", 9_000, 44, False),
    ],
)
def test_a_user_that_continues_to_flood_while_dropped_is_reported_as_a_flooder(
    user: str, count: int, num_bytes: int, is_flood: bool
) -> None:
    fair_share = make_fair_share(1.0)
    fair_share.throttled = user
    fair_share.begin_turn(100.0)
    for _ in range(count):
        assert not fair_share.admits((1, b"r", user), num_bytes)
    fair_share.charge(100.02, user)
    fair_share.end_turn(has_unread=True)
    assert fair_share.flooder == (user if is_flood else None)


@pytest.mark.parametrize(("num_bytes", "is_flood"), [(100, False), (1 << 14, True)])
def test_malformed_messages_count_by_their_bytes(
    num_bytes: int, is_flood: bool
) -> None:
    fair_share = make_fair_share(1.0)
    fair_share.begin_turn(100.0)
    for _ in range(10_000):
        assert fair_share.admits((1, b"r", "mallory"), num_bytes)
        fair_share.record_dropped("mallory", 0, num_bytes)
    fair_share.charge(100.02, "mallory")
    fair_share.end_turn(has_unread=True)
    assert (fair_share.flooder == "mallory") is is_flood


@pytest.mark.parametrize("num_flooders", [1, 5])
def test_a_message_that_arrives_during_a_pause_is_read_in_the_next_turn(
    num_flooders: int,
) -> None:
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.bind("inproc://router")

        def send(user: bytes, count: int) -> None:
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.ROUTING_ID, user)
            dealer.connect("inproc://router")
            for _ in range(count):
                dealer.send(b"message")

        for number in range(num_flooders):
            send(b"mallory-%d" % number, 100)
        receiver = FrameReceiver(router, 5, 2)
        fair_share = make_fair_share(1.0)
        fair_share.throttled = "mallory"
        for turn in range(2 * num_flooders):  # each turn begins with another peer
            for _ in range(1 + turn):
                assert receiver.receive() is not None
            assert router.poll(0)  # ZeroMQ reads a message ahead
            send(b"ann-%d" % turn, 1)
            fair_share.begin_turn(0.0)
            if turn % 2:  # the server reads its sockets in turn
                assert fair_share.admits((2, b"bob", "bob"), 100)
            is_over, users = False, []
            while not is_over:
                frames = receiver.receive()
                assert frames is not None
                users.append(bytes(frames[0]).decode().partition("-")[0])
                fair_share.admits((1, bytes(frames[0]), users[-1]), 100)
                is_over = fair_share.charge(0.0, users[-1])
            assert "ann" in users


def test_equal_users_of_a_busy_loop_are_not_dropped() -> None:
    loop = Loop()
    names = {f"user-{index}": 1 for index in range(20)}
    loop.run(3.0, (), names, lambda user: 3e-4, pace=7e-3)
    assert not loop.dropped


def test_a_user_is_handled_again_after_its_flood_has_ended() -> None:
    loop = Loop()
    loop.run(1.0, ("mallory",), {"ann": 1})
    assert loop.dropped["mallory"]
    loop.run(0.1, (), {"ann": 1, "mallory": 1})
    assert loop.fair_share.throttled is None
    dropped = loop.dropped["mallory"]
    loop.run(1.0, (), {"ann": 1, "mallory": 1})
    assert loop.dropped["mallory"] == dropped


def test_a_larger_weight_gives_a_larger_share() -> None:
    used = {}
    for weight in (1.0, 4.0):
        loop = Loop(make_fair_share(weight))
        loop.run(4.0, ("mallory",), {"ann": 2})
        used[weight] = loop.handled["mallory"]
    assert used[4.0] > 2 * used[1.0]
