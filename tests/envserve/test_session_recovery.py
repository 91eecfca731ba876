"""Recovery from a lost lease: each row loses one step, and no step runs twice."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from envserve.errors import ServerLost
from envserve.lane import Reset
from envserve.session.client.client_session import ClientSession
from envserve.session.states import ClientState
from envserve.slab import Status
from tests.envserve.interrupts import run_traced
from tests.envserve.session_fakes import (
    FakeServer,
    absent_blocks,
    advance_to,
    attach,
    attach_and_restart,
    attach_and_step,
    check_lost,
    collect,
    exchange,
    executed,
    finish,
    make_call,
    make_pair,
    state_of,
    step_all,
)

LOST = [Status.SERVER_LOST] * 4
OK = [Status.OK] * 4
RESETS = [(0, None), (1, None)]


# Steps.


def test_a_restart_costs_each_row_one_step() -> None:
    client, restarted = attach_and_restart()
    outcomes = step_all(client, restarted, 1.0)
    check_lost(client, outcomes, last=3)
    assert "restarted" in outcomes[0].faults[0].text
    (pool,) = restarted.pools.values()
    assert pool.executed == RESETS  # the lost step is not executed again
    assert pool.config.first_incarnation > 0
    assert pool.config.seed == 5

    assert not any(item.faults for item in step_all(client, restarted, 1.0, 8))
    assert client.rows.status.tolist() == OK
    np.testing.assert_array_equal(client.rows.reward, 8)
    np.testing.assert_array_equal(client.rows.observation[0][:, 0], 1)
    assert client.stats()["reattaches"] == 1


def test_with_next_step_the_step_after_a_restart_returns_the_first_observation() -> (
    None
):
    client = attach_and_step(autoreset="next_step")
    client.record_connect(1.0)
    restarted = FakeServer(boot=2)
    outcomes = step_all(client, restarted, 1.0)
    assert [len(each.faults) for each in outcomes] == [2, 2]
    rows = client.rows
    assert rows.status.tolist() == LOST
    assert rows.truncated.all()
    np.testing.assert_array_equal(rows.observation[0][:, 0], 3)
    assert not any(each.faults for each in step_all(client, restarted, 1.0, 8))
    assert executed(restarted) == RESETS
    assert rows.status.tolist() == OK
    assert not rows.truncated.any()
    assert not rows.reward.any()
    np.testing.assert_array_equal(rows.observation[0], 0)
    step_all(client, restarted, 1.0, 8)
    np.testing.assert_array_equal(rows.reward, 8)
    np.testing.assert_array_equal(rows.observation[0][:, 0], 1)


def test_with_next_step_a_partial_reset_does_not_begin_other_episodes() -> None:
    client = attach_and_step(autoreset="next_step")
    client.record_connect(1.0)
    restarted = FakeServer(boot=2)
    step_all(client, restarted, 1.0)
    client.submit_reset([Reset(0, (1,), (7,))], 1.0)
    finish(client, restarted, 1.0)
    rows = client.rows
    assert rows.observation[0][:, 0].tolist() == [3, 0, 3, 3]
    step_all(client, restarted, 1.0, 8)
    assert rows.status.tolist() == [Status.OK, Status.PENDING, *OK[:2]]
    assert not rows.reward.any()
    assert not rows.truncated.any()
    assert not rows.observation[0][:, 0].any()
    step_all(client, restarted, 1.0, 8)
    assert rows.status.tolist() == OK
    assert rows.reward.tolist() == [8] * 4
    assert rows.observation[0][:, 0].tolist() == [1] * 4


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("then", ["", "step", "reset", "invalidate"])
def test_a_loss_after_the_end_of_all_episodes_costs_nothing_with_next_step(
    autoreset: str, then: str
) -> None:
    """The rows are lost as usual if the caller has not received their end as the last.

    That is the case after a reset, or if a result may have been discarded.
    """
    server = FakeServer()
    client = attach(server, autoreset=autoreset)
    while not client.rows.terminated.all():
        step_all(client, server, 0.0)
    if then == "step":  # it is in flight at the loss
        client.submit_step((0, 1), 1.0)
    elif then == "reset":
        client.submit_reset([Reset(0), Reset(1)], 1.0)
        finish(client, server, 1.0)
    elif then == "invalidate":
        client.invalidate("interrupted", 1.0)
    restarted = FakeServer(boot=2)
    client.record_disconnect(1.0)
    client.record_connect(1.1)
    outcomes = finish(client, restarted, 1.1)
    if then != "step":
        outcomes = step_all(client, restarted, 2.0)
    rows, is_whole = client.rows, autoreset == "next_step" and then in ("", "step")
    assert executed(restarted) == RESETS
    assert rows.status.tolist() == (OK if is_whole else LOST)
    assert rows.truncated.tolist() == [not is_whole] * 4
    assert not rows.terminated.any()
    assert not rows.reward.any()
    assert [bool(each.faults) for each in outcomes] == [not is_whole] * 2
    if is_whole:
        assert not rows.observation[0].any()
        step_all(client, restarted, 3.0, 8)
        assert rows.reward.tolist() == [8] * 4


def test_envs_lost_between_steps_are_reset_by_the_next_step() -> None:
    client, restarted = attach_and_restart()
    client.record_disconnect(1.0)
    client.record_connect(1.1)
    assert finish(client, restarted, 1.1) == []
    assert state_of(client) is ClientState.READY
    assert executed(restarted) == []
    assert client.rows.observation[0][:, 0].tolist() == [3] * 4
    check_lost(client, step_all(client, restarted, 2.0), last=3)
    assert executed(restarted) == RESETS


def test_two_losses_before_a_step_cost_one_row_with_the_first_reason() -> None:
    client = attach_and_step()
    client.record_connect(1.0)
    finish(client, FakeServer(boot=2), 1.0)
    client.invalidate("it is replaced", 1.0)
    advance_to(client, 2.0)
    third = FakeServer(boot=3)
    outcomes = step_all(client, third, 2.0)
    check_lost(client, outcomes, last=3)
    assert "restarted" in outcomes[0].faults[0].text
    step_all(client, third, 2.0)
    assert client.rows.status.tolist() == OK


def test_a_reply_that_arrived_before_a_loss_is_collected_after_it() -> None:
    server, client = make_pair(boot=1)
    client.rows.action[0][:] = 9
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    server.finish_all(0.0)
    exchange(client, server, 0.0)
    assert not client.rows.reward.any()  # only `collect` writes rows
    restarted = FakeServer(boot=2)
    client.record_connect(1.0)
    exchange(client, restarted, 1.0)
    assert [outcome.faults for outcome in collect(client)] == [(), ()]
    np.testing.assert_array_equal(client.rows.reward, 9)
    check_lost(client, step_all(client, restarted, 1.0), last=1)


# Resets and calls.


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "resets",
    [[Reset(0), Reset(1)], [Reset(0, (0, 1), (7, 8)), Reset(1, (2, 3), (9, 10))]],
)
def test_a_reset_of_whole_blocks_ends_their_loss(
    resets: list[Reset], is_late: bool
) -> None:
    client, restarted = attach_and_restart(is_noticed=is_late)
    client.submit_reset(resets, 1.0)
    client.advance(1.0)
    exchange(client, restarted, 1.0)
    (pool,) = restarted.pools.values()
    assert [pool.running[0], pool.running[1]] == resets
    outcomes = finish(client, restarted, 1.0)
    assert [(o.error, list(o.faults)) for o in outcomes] == [(None, [])] * 2
    np.testing.assert_array_equal(client.rows.observation[0], 0)
    assert executed(restarted) == RESETS
    step_all(client, restarted, 1.0)
    assert client.rows.status.tolist() == OK


@pytest.mark.parametrize("is_late", [False, True])
def test_a_reset_of_some_rows_leaves_the_block_lost(is_late: bool) -> None:
    client, restarted = attach_and_restart(is_noticed=is_late)
    client.submit_reset([Reset(0, (1,), (7,))], 1.0)
    (outcome,) = finish(client, restarted, 1.0)
    assert (outcome.block, outcome.error, list(outcome.faults)) == (0, None, [])
    assert client.rows.observation[0][:, 0].tolist() == [3, 0, 3, 3]
    step_all(client, restarted, 1.0)
    assert client.rows.status.tolist() == LOST
    assert client.rows.final_observation[0][:, 0].tolist() == [3, 0, 3, 3]
    step_all(client, restarted, 1.0)
    assert client.rows.status.tolist() == OK


def test_a_call_in_flight_fails_and_a_later_one_succeeds() -> None:
    client, restarted = attach_and_restart()
    client.submit_call([make_call([0], "call", "render", block=0)], 1.0)
    (outcome,) = finish(client, restarted, 1.0)
    assert isinstance(outcome.error, ServerLost)
    client.submit_call([make_call([3], "call", "render", block=1)], 1.0)
    (outcome,) = finish(client, restarted, 1.0)
    assert outcome.error is None
    check_lost(client, step_all(client, restarted, 1.0), last=3)


# Absence.


def test_lost_blocks_are_absent_until_they_are_reset() -> None:
    client, restarted = attach_and_restart(builds_at_once=False)
    client.submit_step([0], 1.0)
    exchange(client, restarted, 1.0)
    assert absent_blocks(client) == {0}
    client.submit_step([1], 1.0)
    assert client.client_blocks.is_ready(1)
    assert client.client_blocks.absent == {0, 1}
    client.rows.observation[0][:] = np.nan  # padding may overwrite it
    restarted.build(next(iter(restarted.pools)), 2.0)
    exchange(client, restarted, 2.0)
    assert absent_blocks(client) == {0, 1}  # during the reset
    np.testing.assert_array_equal(client.rows.final_observation[0][:, 0], 3)
    outcomes = finish(client, restarted, 30.0)
    assert [outcome.block for outcome in outcomes] == [0, 1]
    check_lost(client, outcomes, last=3)
    assert not client.client_blocks.absent


def test_an_invalidated_lease_is_returned_and_replaced() -> None:
    server, client = make_pair()
    step_all(client, server, 0.0)
    client.submit_step([0], 1.0)
    exchange(client, server, 1.0)
    server.finish_all(1.0)
    exchange(client, server, 1.0)
    client.submit_step([1], 1.0)
    client.invalidate("a call was interrupted", 1.0)
    assert client.num_in_flight == 0
    assert finish(client, server, 1.0) == []
    assert ("", 11) not in server.pools
    assert len(server.pools) == 1
    outcomes = step_all(client, server, 2.0)
    check_lost(client, outcomes, last=1)
    assert "a call was interrupted" in outcomes[0].faults[0].text
    client.begin_close(3.0)
    client.invalidate("once more", 3.0)
    exchange(client, server, 3.0)
    assert state_of(client) is ClientState.CLOSED
    client.invalidate("even now", 3.0)
    assert not client.outbox


@pytest.mark.parametrize("then", ["invalidate", "wait and invalidate", "close"])
def test_an_invalidation_that_is_interrupted_at_any_line_returns_the_old_lease(
    then: str,
) -> None:
    """The caller repeats it (see `LaneGroup.recover`) or closes the lane.

    Until then, the lane's keep-alive thread may continue to replace the lease.
    """
    _, client = make_pair()
    lines = run_traced(lambda: client.invalidate("interrupted", 1.0), -1)
    for number, line in enumerate(lines, 1):
        server, client = make_pair()
        run_traced(partial(client.invalidate, "interrupted", 1.0), number)
        if then == "wait and invalidate":
            assert finish(client, server, 1.0) == []
        if then == "close":
            client.begin_close(1.0)
        else:
            client.invalidate("once more", 1.0)
        for now in (1.0, 2.0):
            assert finish(client, server, now) == []
        assert ("", 11) not in server.pools, line
        assert len(server.pools) == (then != "close"), line
        end = ClientState.CLOSED if then == "close" else ClientState.READY
        assert state_of(client) is end, line


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_close_that_is_interrupted_at_any_line_returns_all_leases(
    is_lost: bool,
) -> None:
    """The caller repeats it (see `RemoteLane.close`)."""

    def make() -> tuple[FakeServer, ClientSession]:
        server, client = make_pair()
        if is_lost:
            client.invalidate("interrupted", 1.0)
            client.outbox.clear()  # its DETACH was not sent
        return server, client

    _, client = make()
    lines = run_traced(lambda: client.begin_close(1.0), -1)
    for number, line in enumerate(lines, 1):
        server, client = make()
        run_traced(partial(client.begin_close, 1.0), number)
        client.begin_close(1.0)
        assert finish(client, server, 1.0) == []
        assert not server.pools, line
        assert state_of(client) is ClientState.CLOSED, line
