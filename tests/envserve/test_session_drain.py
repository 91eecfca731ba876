"""A draining server grants no leases, and ends each lease after an episode."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from envserve.errors import EnvsBusy, LeaseLost, ServerDraining
from envserve.lane import Outcome, Reset
from envserve.session.client.client_session import ClientSession
from envserve.session.states import ClientState
from envserve.settings import HostSettings
from envserve.wire.bodies import Drain
from envserve.wire.constants import MessageType
from envserve.wire.handshake import Hello, Welcome
from envserve.wire.message import decode, encode
from tests.envserve.session_fakes import (
    FakePool,
    FakeServer,
    SingleLeaseSession,
    attach,
    attach_and_step,
    collect,
    exchange,
    finish,
    make_pair,
    pass_time,
    state_of,
    take_outgoing,
    try_to_attach,
)

GRACE = 8.0


def drain(server: FakeServer, now: float = 0.0) -> None:
    server.carry_out(server.protocol.begin_drain(GRACE), now)


def step(client: ClientSession, server: FakeServer, *blocks: int) -> list[Outcome]:
    """Step blocks, whose rows end an episode at every seventh step."""
    client.submit_step(blocks or range(len(client.blocks)), 0.0)
    return finish(client, server, 0.0)


def reset(client: ClientSession, server: FakeServer, *resets: Reset) -> None:
    client.submit_reset(resets, 0.0)
    finish(client, server, 0.0)


def welcome_of(server: FakeServer) -> Welcome:
    (reply,) = server.replies_to(MessageType.HELLO, boot=0, body=Hello().encode())
    return Welcome.decode(reply.body)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_server_that_drains_or_stops_grants_no_leases(is_stopped: bool) -> None:
    server = FakeServer()
    assert not welcome_of(server).is_draining
    drain(server)
    assert server.protocol.has_ended  # immediately, because there are no leases
    if is_stopped:
        server.carry_out(server.protocol.stop(0.0), 0.0)
    client = try_to_attach(server)
    assert isinstance(client.error, ServerDraining)
    assert isinstance(client.error, EnvsBusy)
    assert "draining" in str(client.error)
    assert not server.pools
    assert welcome_of(server).is_draining


def test_every_client_is_notified_of_the_grace_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeServer()
    clients = [attach(server, session=number) for number in (1, 2)]
    drain(server)
    messages = [decode(reply) for reply in server.take_replies()]
    assert [message.type for message in messages] == [MessageType.DRAIN] * 2
    for client, message in zip(clients, messages, strict=True):
        assert Drain.decode(message.body).grace_ms == 1000 * GRACE
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(100):  # a hostile server repeats it
                client.receive(encode(message), 0.0)
        assert client.state is ClientState.READY
        (text,) = caplog.messages
        assert "tcp://fake:1: the server is draining" in text
        assert "in 8 s" in text


def test_clients_can_be_notified_of_the_longest_grace_period() -> None:
    server, client = make_pair()
    with pytest.raises(ValueError, match="drain_grace_seconds"):
        HostSettings(drain_grace_seconds=2.0**53)
    longest = HostSettings(drain_grace_seconds=math.nextafter(2.0**53, 0))
    server.carry_out(server.protocol.begin_drain(longest.drain_grace_seconds), 0.0)
    exchange(client, server, 0.0)
    assert client.state is ClientState.READY


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_client_that_has_reconnected_is_notified_over_its_new_connection(
    is_idle: bool,
) -> None:
    server, client = make_pair()
    if is_idle:
        client.record_connect(0.0)
    else:
        client.submit_step([0], 0.0)
    (frames,) = take_outgoing(client)
    server.receive((b"another route", ""), frames, 0.0)
    drain(server)
    assert server.replies[-1].peer == (b"another route", "")


def test_a_lease_ends_when_each_row_has_ended_an_episode() -> None:
    server = FakeServer()
    client = attach(server, num_splits=2, kind=SingleLeaseSession)
    assert len(client.blocks) == 4
    for _ in range(7):
        step(client, server)  # earlier episode ends do not count
    drain(server)
    for _ in range(6):
        step(client, server)
    step(client, server, 0, 1, 2)
    assert state_of(client) is ClientState.READY
    (last,) = step(client, server, 3)
    assert state_of(client) is ClientState.LOST
    assert isinstance(client.error, LeaseLost)
    assert "the server was drained; each env of the lease ended" in str(client.error)
    # Before the lease ends, the step that ended the last episode is answered.
    assert last.block == 3
    assert last.error is None
    assert client.rows.terminated.all()
    np.testing.assert_array_equal(client.rows.observation[0][:, 0], [14] * 4)


@pytest.mark.parametrize("is_absent", [False, True])
def test_a_lease_does_not_end_before_the_result_that_ends_its_last_episode(
    is_absent: bool,
) -> None:
    server = FakeServer()
    client = attach(server, kind=SingleLeaseSession)
    drain(server)
    for _ in range(7):
        step(client, server, 0)
    for _ in range(6):
        step(client, server, 1)
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    server.finish(("", 11), 1, 0.0)
    exchange(client, server, 0.0)
    assert state_of(client) is ClientState.READY
    if is_absent:  # block 1 is answered without waiting for block 0
        server.carry_out(server.protocol.pool_finished(("", 11), [], {0}), 0.0)
    else:
        server.finish(("", 11), 0, 0.0)
    exchange(client, server, 0.0)
    assert state_of(client) is ClientState.LOST
    errors = {outcome.block: outcome.error for outcome in collect(client)}
    assert errors == {0: client.error if is_absent else None, 1: None}
    assert client.rows.terminated[2:].all()


class BriefPool(FakePool):
    """A pool in which each step ends an episode."""

    def _step(self, row: int) -> None:
        super()._step(row)
        self.rows.terminated[row] = True


def test_a_lease_ends_although_another_request_always_has_an_unanswered_end() -> None:
    server = FakeServer(pool=BriefPool)
    client = attach(server, num_splits=2, kind=SingleLeaseSession)
    drain(server)
    requests = [[0, 1], [2, 3]]
    client.submit_step(requests[0], 0.0)
    exchange(client, server, 0.0)
    server.finish(("", 11), 0, 0.0)
    for first, last in requests[1], requests[0]:
        assert state_of(client) is ClientState.READY
        client.submit_step([first, last], 0.0)
        exchange(client, server, 0.0)
        server.finish(("", 11), first, 0.0)  # ends an episode, but is not answered yet
        server.finish(("", 11), (last + 2) % 4, 0.0)
        exchange(client, server, 0.0)
        collect(client)
    assert state_of(client) is ClientState.LOST
    assert "each env of the lease ended" in str(client.error)


def test_a_reset_ends_an_episode_but_a_failed_operation_does_not() -> None:
    server = FakeServer()
    client = attach(server, kind=SingleLeaseSession)
    drain(server)
    step(client, server, 0)
    pool = server.pools["", 11]
    client.submit_step([1], 0.0)
    exchange(client, server, 0.0)
    failed = pool.finish(1, error=LeaseLost("the rows are invalid"))
    pool.rows.terminated[2:] = True
    server.carry_out(server.protocol.pool_finished(("", 11), [failed]), 0.0)
    exchange(client, server, 0.0)
    client.collect()
    for block in (0, 1):
        assert state_of(client) is ClientState.READY
        reset(client, server, Reset(block))
    assert state_of(client) is ClientState.LOST


def test_a_reset_of_some_rows_does_not_end_the_episodes_of_the_others() -> None:
    server = FakeServer()
    client = attach(server, kind=SingleLeaseSession)
    rows = [range(block.start, block.stop) for block in client.blocks]
    drain(server)
    for place in (0, 1):
        assert state_of(client) is ClientState.READY
        reset(client, server, *(Reset(b, (rows[b][place],)) for b in range(2)))
    assert state_of(client) is ClientState.LOST


def test_a_drain_does_not_wait_for_a_client_that_was_silent_for_too_long() -> None:
    server, client = make_pair()
    drain(server)
    server.carry_out(server.protocol.expire_leases(1000.0), 1000.0)
    assert not server.pools
    assert server.protocol.has_ended
    server.carry_out(server.protocol.stop(1000.0), 1000.0)
    assert server.protocol.has_ended
    assert state_of(client) is ClientState.READY


def test_envs_that_are_being_built_are_not_granted() -> None:
    server = FakeServer(builds_at_once=False)
    client = try_to_attach(server)
    drain(server)
    exchange(client, server, 0.0)
    assert isinstance(client.error, ServerDraining)
    assert server.protocol.leases.num_free_envs == 128


def test_a_drain_does_not_wait_for_acknowledgements_but_a_stop_does() -> None:
    """A client that died during the build would delay the end by the grace period."""
    server = FakeServer(builds_at_once=False)
    client = try_to_attach(server)
    drain(server)
    assert server.protocol.has_ended
    server.carry_out(server.protocol.stop(0.0), 0.0)
    assert not server.protocol.has_ended
    exchange(client, server, 0.0)
    assert server.protocol.has_ended


def test_a_client_that_replaces_a_lease_does_not_delay_the_end_of_a_drain() -> None:
    client = attach_and_step()
    server = FakeServer(boot=2, builds_at_once=False)
    client.record_connect(1.0)
    exchange(client, server, 1.0)
    drain(server, 1.0)
    server.carry_out(server.protocol.stop(1.0), 1.0)
    assert not server.protocol.has_ended
    exchange(client, server, 1.0)
    assert server.protocol.has_ended
    assert state_of(client) is ClientState.ATTACHING  # it tries again
    restarted = FakeServer(boot=3)
    pass_time(client, restarted, 1.0, until=2.0)
    assert state_of(client) is ClientState.READY


def test_leases_left_at_the_end_of_the_grace_period_are_ended() -> None:
    server = FakeServer()
    client = attach(server, kind=SingleLeaseSession)
    client.submit_step([0], 0.0)
    exchange(client, server, 0.0)
    drain(server)
    server.carry_out(server.protocol.stop(0.0, "its grace period was over"), GRACE)
    exchange(client, server, GRACE)
    assert isinstance(client.error, LeaseLost)
    assert "drained: its grace period was over" in str(client.error)
    (cut,) = client.collect()
    assert cut.error is client.error


def test_a_drain_is_over_when_every_client_was_notified() -> None:
    server = FakeServer()
    assert not server.protocol.has_ended
    leaving, ended, late = (attach(server, session=number) for number in (1, 2, 3))
    drain(server)
    leaving.begin_close(0.0)
    exchange(leaving, server, 0.0)
    ended.submit_reset([Reset(0), Reset(1)], 0.0)
    exchange(ended, server, 0.0)
    server.finish_all(0.0)
    server.carry_out(server.protocol.stop(0.0), 0.0)
    assert not server.pools
    replies = server.take_replies()
    for client in (ended, late):
        assert not server.protocol.has_ended
        for frames in replies:
            client.receive(frames, 0.0)
        exchange(client, server, 0.0)
    assert server.protocol.has_ended


def test_a_server_that_stops_does_not_wait_for_a_client_that_has_detached() -> None:
    server, client = make_pair()
    client.begin_close(0.0)
    decisions = []
    for frames in take_outgoing(client):
        decisions += server.protocol.receive((b"route", ""), frames, 0.0)
    server.carry_out(server.protocol.stop(0.0), 0.0)
    assert not server.protocol.has_ended
    server.carry_out(decisions, 0.0)  # its workers have exited
    assert server.protocol.has_ended


def test_a_server_that_stops_does_not_wait_for_a_silent_client() -> None:
    server = FakeServer()
    attach(server, session=1)
    client = attach(server, 9.0, session=2)
    server.carry_out(server.protocol.stop(10.0), 10.0)
    assert not server.protocol.has_ended
    for frames in server.take_replies():
        client.receive(frames, 10.0)
    exchange(client, server, 10.0)
    assert server.protocol.has_ended
