"""Replies wait for room in the queues of their peers, but not for ever."""

from __future__ import annotations

from envserve.server.deferred_replies import DeferredReplies
from envserve.session.server.decisions import Reply

FAST, SLOW = (1, b"fast", ""), (1, b"slow", "")
MIB = 1 << 20


class Queues:
    """The queues of two peers, one of which never has room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[Reply] = []

    def send(self, reply: Reply) -> bool:
        is_sent = reply.peer == FAST and self.room > 0
        if is_sent:
            self.room -= 1
            self.sent.append(reply)
        return is_sent


def test_replies_are_sent_in_order_when_there_is_room() -> None:
    deferred, queues = DeferredReplies(), Queues(room=2)
    replies = [Reply(FAST, [b"%d" % number]) for number in range(5)]
    for reply in replies:
        assert deferred.add(reply, 0.0)
    assert not deferred.send(queues.send, deferred.retry_at)
    assert queues.sent == replies[:2]
    queues.room = 9
    assert not deferred.send(queues.send, deferred.retry_at)
    assert queues.sent == replies
    assert not deferred


def test_replies_to_a_peer_that_does_not_read_are_dropped_after_few_attempts() -> None:
    deferred, queues = DeferredReplies(), Queues(room=0)
    replies = [Reply(SLOW, [b"0"]), Reply(SLOW, [b"1"])]
    for reply in replies:
        deferred.add(reply, 0.0)
    num_attempts, dropped = 0, list[Reply]()
    while deferred:
        now = deferred.retry_at
        assert not deferred.send(queues.send, now - 1e-4)  # too early
        dropped += deferred.send(queues.send, now)
        num_attempts += 1
        if now < 0.05:  # other peers do not wait for this one
            queues.room = 1
            deferred.add(Reply(FAST, [b"2"]), now - 0.001)
            assert not deferred.send(queues.send, now)
            assert FAST not in deferred
    assert dropped == replies
    assert num_attempts < 10
    assert now < 0.2


def test_many_slow_peers_share_the_attempts() -> None:
    deferred, queues = DeferredReplies(), Queues(room=0)
    for number in range(400):
        deferred.add(Reply((1, b"%d" % number, ""), [b""]), number * 2e-6)
    num_attempts = 0
    while deferred:
        deferred.send(queues.send, deferred.retry_at)
        num_attempts += 1
    assert num_attempts < 30


def test_the_size_of_waiting_replies_is_limited() -> None:
    deferred, queues = DeferredReplies(), Queues(room=2)
    for peer in (FAST, SLOW):
        assert deferred.add(Reply(peer, [bytes(31 * MIB)]), 0.0)
    large = Reply(FAST, [b"", bytes(3 * MIB)])
    assert not deferred.add(large, 0.0)
    deferred.send(queues.send, deferred.retry_at)
    assert deferred.add(large, 0.0)
    while deferred:
        deferred.send(queues.send, deferred.retry_at)
    assert deferred.add(Reply(SLOW, [bytes(63 * MIB)]), 0.0)
