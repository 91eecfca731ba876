"""Rows of lost, absent and interrupted envs equal those of an oracle."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from envserve.client import BatchEnv, StepResult
from envserve.client.absence import Absence
from envserve.client.row_set import BatchBlocks
from envserve.errors import EnvserveError, ServerLost
from envserve.lane import Outcome, mark_harmless, pop_harmless_mark
from envserve.slab import Status
from tests.envserve.interrupts import is_return, run_traced
from tests.simulation.fake_lane import FakeLane, Faults, next_hash

Array = np.ndarray[Any, Any]


class Oracle:
    """A batch of fake lanes that checks every returned row.

    Attributes:
      shown: Last observation of each row that was returned to the caller.
      statuses: Number of returned rows by status.
      has_interrupts: Whether an interrupted call may have cost episodes.
      max_unseen: Maximum number of interrupted steps that were applied.
    """

    has_interrupts = False
    max_unseen = 0

    def __init__(self, lanes: list[FakeLane], padding_after: float = 0.0) -> None:
        self.lanes = lanes
        self.batch = BatchEnv(lanes, padding_after=padding_after)
        chances = [lane.faults for lane in lanes]
        for lane in lanes:
            lane.faults = Faults(draw=lane.faults.draw)
        self.shown = self.batch.reset()
        for lane, faults in zip(lanes, chances, strict=True):
            lane.faults = faults
        self.statuses: Counter[Status] = Counter()
        self.lost = np.zeros(self.batch.num_envs, int)

    @property
    def truth(self) -> Array:
        """The envs' current state."""
        return np.concatenate([lane.state for lane in self.lanes])

    def check(self, rows: Array, actions: Array, result: StepResult) -> None:
        for at, row in enumerate(rows):
            status = Status(int(result.status[at]))
            self.statuses[status] += 1
            before, after = self.shown[row], result.observation[at]
            assert bool(result.valid[at]) == (status is Status.OK)
            assert not result.terminated[at]
            if status is Status.PENDING:
                self.check_last(before, after)
                assert (result.reward[at], result.truncated[at]) == (0.0, False)
                continue
            assert after.tolist() == self.truth[row].tolist(), status
            if status in (Status.OK, Status.LATE):
                action = int(result.reward[at])
                assert status is Status.LATE or action == actions[at]
                num_unseen = int(after[1] - before[1]) - 1
                assert before[0] == after[0]
                assert 0 <= num_unseen <= self.max_unseen
                assert num_unseen or after[2] == next_hash(int(before[2]), action)
            else:
                assert status is Status.WORKER_DIED
                assert result.truncated[at]
                assert after[1] == 0
                assert after[0] > before[0]
                self.check_last(before, result.final_observation[at])
                self.lost[row] += 1
            self.shown[row] = after

    def check_last(self, before: Array, last: Array) -> None:
        """Check the last observation; it may be newer if calls were interrupted."""
        assert self.has_interrupts or last.tolist() == before.tolist()

    def check_losses(self) -> None:
        """Check that each loss was returned in one row, unless it is still pending."""
        first = 0
        for lane in self.lanes:
            for block in lane.blocks:
                for row in range(first + block.start, first + block.stop):
                    assert 0 <= lane.losses[block.index] - self.lost[row] <= 1
            first += lane.num_envs


def make_lanes(rng: random.Random, **chances: float) -> list[FakeLane]:
    faults = Faults(**chances, draw=rng.random)
    return [
        FakeLane(rng.randint(1, 5), rng.randint(1, 3), faults)
        for _ in range(rng.choice([1, 1, 2, 3]))
    ]


seeds = pytest.mark.parametrize("seed", range(8))


@seeds
@pytest.mark.parametrize("padding_after", [0.0, 0.001, np.inf])
def test_every_row_of_a_step_is_valid_lost_late_or_padding(
    seed: int, padding_after: float
) -> None:
    rng = random.Random(seed)
    lanes = make_lanes(rng, lose=0.05, silence=0.1)
    oracle = Oracle(lanes, padding_after)
    rows = np.arange(oracle.batch.num_envs)
    with oracle.batch as batch:
        for _ in range(200):
            actions = np.array([rng.randrange(1000) for _ in rows])
            oracle.check(rows, actions, batch.step(actions))
    oracle.check_losses()
    assert oracle.statuses[Status.OK] > 0
    assert oracle.statuses[Status.WORKER_DIED] > 0
    if padding_after == np.inf:
        assert not oracle.statuses[Status.PENDING] + oracle.statuses[Status.LATE]


@seeds
def test_every_received_row_is_valid_lost_late_or_padding(seed: int) -> None:
    rng = random.Random(seed)
    oracle = Oracle(make_lanes(rng, lose=0.05, silence=0.1))
    with oracle.batch as batch:
        sent: dict[int, int] = {}
        for _ in range(200):
            for block in batch.blocks:
                if block[0] not in sent and rng.random() < 0.7:
                    actions = np.array([rng.randrange(1000) for _ in block])
                    batch.send(actions, block)
                    sent.update(zip(block.tolist(), actions.tolist(), strict=True))
            if sent:
                rows, result = batch.recv(rng.randint(1, len(sent)))
                actions = np.array([sent.pop(int(row)) for row in rows])
                oracle.check(rows, actions, result)
            assert batch.num_in_flight == len(sent)
    oracle.check_losses()


@seeds
def test_an_interrupt_while_waiting_costs_no_episode(seed: int) -> None:
    rng = random.Random(seed)
    oracle = Oracle(make_lanes(rng))
    oracle.lanes[0].faults.interrupt_waiting = 0.2
    num_interrupts = 0
    rows = np.arange(oracle.batch.num_envs)
    with oracle.batch as batch:
        for _ in range(200):
            actions = np.array([rng.randrange(1000) for _ in rows])
            try:
                result = batch.step(actions)
            except KeyboardInterrupt:
                num_interrupts += 1
                oracle.max_unseen += 1
            else:
                oracle.check(rows, actions, result)
                oracle.max_unseen = 0
    assert num_interrupts > 10
    assert oracle.statuses.keys() == {Status.OK}


def is_of_client(path: str) -> bool:
    return "/envserve/client/" in path or path.endswith("fake_lane.py")


def take_step(batch: BatchEnv, actions: Array, results: list[StepResult]) -> None:
    results.append(batch.step(actions))


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_an_interrupt_at_any_line_never_returns_a_wrong_row(num_lanes: int) -> None:
    line = 0
    while True:
        line += 1
        rng = random.Random(line)
        chances = Faults(draw=rng.random, lose=0.02, silence=0.05)
        oracle = Oracle([FakeLane(3, 2, chances) for _ in range(num_lanes)])
        oracle.has_interrupts = True
        rows = np.arange(oracle.batch.num_envs)
        with oracle.batch as batch:
            for _ in range(3):
                actions = np.array([rng.randrange(1000) for _ in rows])
                oracle.check(rows, actions, batch.step(actions))
            results: list[StepResult] = []
            step = partial(take_step, batch, rows + 100, results)
            oracle.max_unseen = 1
            places = run_traced(step, line, is_of_client)
            for result in results:
                oracle.check(rows, rows + 100, result)
            if len(places) == line and is_return(places[-1]):
                continue  # the interrupt discarded the result while `step` returned
            for _ in range(10):
                actions = np.array([rng.randrange(1000) for _ in rows])
                oracle.check(rows, actions, batch.step(actions))
        if len(places) < line:
            assert line > 50
            return


@seeds
def test_resets_and_calls_wait_for_late_steps(seed: int) -> None:
    rng = random.Random(seed)
    oracle = Oracle(make_lanes(rng, lose=0.03, silence=0.2))
    batch = oracle.batch
    rows = np.arange(batch.num_envs)
    with batch:
        for _ in range(100):
            actions = np.array([rng.randrange(1000) for _ in rows])
            oracle.check(rows, actions, batch.step(actions))
            if rng.random() < 0.2:
                chosen = np.array(
                    sorted(rng.sample(range(len(rows)), rng.choice(rows + 1)))
                )
                first = batch.reset(chosen)
                assert (first[:, 1] == 0).all()
                assert first.tolist() == oracle.truth[chosen].tolist()
                oracle.shown[chosen] = first
            elif rng.random() < 0.2:
                with contextlib.suppress(EnvserveError):  # lost during the call
                    batch.call(rng.randrange(batch.num_envs), "name")


def test_a_step_waits_if_all_envs_are_absent() -> None:
    rng = random.Random(0)
    lanes = [FakeLane(2, 2, Faults(draw=rng.random)) for _ in range(2)]
    oracle = Oracle(lanes)
    for lane in lanes:
        lane.invalidate("for the test")
    with oracle.batch as batch:
        result = batch.step(np.zeros(4, np.int64))
        oracle.check(np.arange(4), np.zeros(4), result)
    assert (result.status != Status.PENDING).any()


def test_blocks_get_the_full_waiting_time_after_another_block_is_back() -> None:
    lane = FakeLane(2, 2, Faults(draw=random.Random(0).random))
    absence = Absence(BatchBlocks.of([lane]), 0.5)
    both, second = {0, 1}, {1}
    for now in (0.0, 10.0):  # every block is absent
        absence.pad(both, both, now)
        assert (absence.padded, absence.next_pad) == (set(), math.inf)
    absence.release({0})
    absence.pad(second, both, 10.25)
    assert (absence.padded, absence.next_pad) == (set(), 10.75)
    absence.pad(second, both, 10.75)
    assert absence.padded == second


def test_the_next_absence_of_a_block_whose_step_was_discarded_is_a_new_one() -> None:
    absence = Absence(BatchBlocks.of([FakeLane(2, 2, Faults())]), 0.5)
    absence.pad({0}, {0}, 0.0)
    absence.mark_late({0})
    absence.late_steps.clear()  # it has finished, and its result was discarded
    absence.pad({0}, {0}, 10.0)
    assert (absence.padded, absence.next_pad) == (set(), 10.5)


class ScriptedLane(FakeLane):
    """A lane with one row per block, whose operations take several calls of `collect`.

    Attributes:
      delays: Number of calls to come before an operation finishes, by block.
      missing: Blocks that are absent while they are in flight.
      timeouts: Timeouts of the calls.
      gives_up_after: Sum of timeouts after which the lane has a `give_up_error`.
    """

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, num_envs, Faults())
        self.delays: dict[int, int] = {}
        self.missing: set[int] = set()
        self.timeouts: list[float] = []
        self.gives_up_after = math.inf

    @property
    def absent(self) -> set[int]:
        return self.missing & self.running.keys()

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        self.timeouts.append(timeout_seconds)
        if sum(self.timeouts) >= self.gives_up_after:
            self.give_up_error = ServerLost("the server is lost")
        ended = self.end_after_giving_up()
        finished = [block for block in self.running if not self.delays.get(block)]
        self.delays = {block: n - 1 for block, n in self.delays.items() if n}
        return ended + [self.finish(block) for block in finished]


def test_each_absence_of_a_block_gets_the_full_waiting_time() -> None:
    lane = ScriptedLane(2)
    lane.missing = {1}
    with BatchEnv([lane], padding_after=1e-9) as batch:
        batch.reset()
        for action in range(3):
            lane.delays = {1: 1}
            assert batch.step([action, action]).valid.all()


def test_rows_that_became_absent_while_others_were_received_are_padding() -> None:
    lane = ScriptedLane(4)
    with BatchEnv([lane], padding_after=0.0) as batch:
        batch.reset()
        lane.missing, lane.delays = {0, 1}, {0: 9, 1: 9}
        batch.send([1, 1], [0, 1])
        for row in (0, 1):
            lane.timeouts.clear()
            _, result = batch.recv(env_indices=[row])
            assert result.status.tolist() == [Status.PENDING]
        assert not any(lane.timeouts)


def test_absent_envs_come_back_although_padding_is_enough_for_each_call() -> None:
    lane = ScriptedLane(2)
    seen: set[tuple[int, int]] = set()
    with BatchEnv([lane], padding_after=0.0) as batch:
        batch.reset()
        lane.missing, lane.delays = {0}, {0: 5, 1: 5}
        batch.send([1, 1])
        for _ in range(20):
            rows, result = batch.recv()
            seen.update(zip(rows.tolist(), result.status.tolist(), strict=True))
            batch.send([1] * len(rows), rows)
    assert seen >= {(0, Status.PENDING), (0, Status.LATE), (1, Status.OK)}


def test_absent_rows_that_are_not_awaited_cause_no_busy_waiting() -> None:
    lane = ScriptedLane(2)
    with BatchEnv([lane], padding_after=0.0) as batch:
        batch.reset()
        lane.missing, lane.delays = {0}, {0: 9, 1: 3}
        batch.send([1, 1])
        batch.recv(env_indices=[1])
        assert 0.0 not in lane.timeouts


def test_a_step_raises_server_lost_soon_after_the_only_lane_has_given_up() -> None:
    lane = ScriptedLane(2)
    with BatchEnv([lane]) as batch:
        batch.reset()
        lane.missing, lane.delays = {0, 1}, {0: 99, 1: 99}
        lane.gives_up_after = sum(lane.timeouts) + 5.0
        with pytest.raises(ServerLost):
            batch.step([1, 1])
        assert sum(lane.timeouts) < lane.gives_up_after + 1.5


def test_an_interrupt_while_steps_are_sent_beside_a_late_one_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = [ScriptedLane(1), ScriptedLane(1)]
    with BatchEnv(lanes, padding_after=0.0) as batch:
        batch.reset()
        lanes[0].missing, lanes[0].delays = {0}, {0: 99}
        expected = [Status.PENDING, Status.OK]
        assert batch.step([1, 1]).status.tolist() == expected

        def interrupt(blocks: Sequence[int]) -> None:
            FakeLane.submit_step(lanes[1], blocks)
            error = KeyboardInterrupt()
            mark_harmless(error)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(lanes[1], "submit_step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                batch.step([2, 2])
        result = batch.step([3, 3])
        assert result.status.tolist() == expected
        assert result.reward[1] == 3


def test_an_interrupt_of_a_reset_is_not_harmless_when_it_is_raised_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes, error = [ScriptedLane(1), ScriptedLane(1)], KeyboardInterrupt()

    def interrupt(_: object) -> None:
        mark_harmless(error)
        raise error

    with BatchEnv(lanes) as batch:
        batch.reset()
        batch.send([1, 1])
        with monkeypatch.context() as patch:
            patch.setattr(lanes[0], "collect", mock.Mock(side_effect=error))
            with pytest.raises(KeyboardInterrupt):
                batch.recv(2)
            patch.setattr(lanes[0], "submit_step", interrupt)
            with pytest.raises(KeyboardInterrupt):  # while the batch recovers
                batch.recv(2)
        assert not pop_harmless_mark(error)
        assert batch.recv(2)[1].lost.all()
        with monkeypatch.context() as patch:
            patch.setattr(lanes[0], "submit_reset", interrupt)
            with pytest.raises(KeyboardInterrupt):
                batch.reset()
        assert not pop_harmless_mark(error)


def test_a_call_raises_server_lost_instead_of_waiting_for_a_lost_server() -> None:
    rng = random.Random(0)
    lanes = [FakeLane(2, 1, Faults(draw=rng.random)) for _ in range(2)]
    oracle = Oracle(lanes)
    gone = lanes[1]
    gone.invalidate("for the test")
    gone.faults = Faults(draw=rng.random, end=0.0)
    gone.give_up_error = ServerLost("the first is lost")
    actions = np.zeros(4, np.int64)
    with oracle.batch as batch:
        for _ in range(2):
            with pytest.raises(ServerLost, match="the first is lost"):
                batch.call(3, "name")
            result = batch.step(actions)
            assert result.status.tolist() == [Status.OK] * 2 + [Status.PENDING] * 2
        lanes[0].invalidate("for the test")
        lanes[0].faults = gone.faults
        lanes[0].give_up_error = ServerLost("the second is lost")
        with pytest.raises(ServerLost, match="the second is lost"):
            batch.step(actions)


def test_a_reset_does_not_wait_for_a_lost_server() -> None:
    lanes = [FakeLane(2, 1, Faults(end=1.0)) for _ in range(2)]
    actions = np.zeros(4, np.int64)
    with BatchEnv(lanes, padding_after=0.0) as batch:
        batch.reset()
        last = batch.step(actions).observation
        lanes[1].invalidate("for the test")
        lanes[1].faults.end = 0.0
        lanes[1].give_up_error = ServerLost("the first is lost")
        for _ in range(2):
            first = batch.reset()
            assert first[:2, 1].tolist() == [0, 0]
            assert first[2:].tolist() == last[2:].tolist()
            assert batch.reset([2, 3]).tolist() == last[2:].tolist()
            result = batch.step(actions)
            assert result.status.tolist() == [Status.OK] * 2 + [Status.PENDING] * 2
            assert result.observation[2:].tolist() == last[2:].tolist()
        lanes[0].give_up_error = ServerLost("the second is lost")
        with pytest.raises(ServerLost, match="the second is lost"):
            batch.reset()
        lanes[0].give_up_error = lanes[1].give_up_error = None
        lanes[1].faults.end = 1.0
        batch.reset()
        assert batch.step(actions).valid.all()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_reset_skips_rows_whose_server_counts_as_lost_meanwhile(
    is_late: bool,
) -> None:
    lanes = [ScriptedLane(2), ScriptedLane(2)]
    with BatchEnv(lanes, padding_after=0.0) as batch:
        batch.reset()
        last = batch.step([1] * 4).observation
        gone = lanes[1]
        gone.invalidate("for the test")
        gone.missing, gone.delays = {0, 1}, {0: 999, 1: 999}
        if is_late:
            assert batch.step([1] * 4).status.tolist() == [0, 0, *[Status.PENDING] * 2]
        gone.gives_up_after = 0.0
        first = batch.reset()
        assert gone.give_up_error is not None
        assert first[:2, 1].tolist() == [0, 0]
        assert first[2:].tolist() == last[2:].tolist()
        for _ in range(2):
            result = batch.step([1] * 4)
            assert result.status.tolist() == [0, 0, *[Status.PENDING] * 2]
            assert result.observation[2:].tolist() == last[2:].tolist()


def test_a_batch_can_be_used_after_a_server_was_lost_during_a_call() -> None:
    lanes = [ScriptedLane(2), ScriptedLane(2)]
    with BatchEnv(lanes, padding_after=0.0) as batch:
        batch.reset()
        gone = lanes[1]
        gone.invalidate("for the test")
        gone.missing, gone.delays = {0, 1}, {0: 999, 1: 999}
        gone.gives_up_after = 0.0
        for _ in range(2):
            with pytest.raises(ServerLost):
                batch.call_each("name")
            assert batch.step([1] * 4).valid.tolist() == [True, True, False, False]
            batch.reset()


def test_a_reset_raises_server_lost_if_the_only_server_is_lost_meanwhile() -> None:
    lane = ScriptedLane(2)
    with BatchEnv([lane]) as batch:
        batch.reset()
        lane.missing, lane.delays = {0, 1}, {0: 999, 1: 999}
        lane.gives_up_after = sum(lane.timeouts) + 3.0
        for _ in range(2):
            with pytest.raises(ServerLost):
                batch.reset()
        lane.give_up_error, lane.gives_up_after, lane.delays = None, math.inf, {}
        batch.reset()
        assert batch.step([1, 1]).valid.all()


def test_idle_rows_of_lost_servers_are_no_reason_to_return_only_padding() -> None:
    lane = ScriptedLane(2)
    with BatchEnv([lane], padding_after=0.0) as batch:
        batch.reset()
        lane.missing, lane.delays = {0, 1}, {0: 999}
        lane.give_up_error = ServerLost("the server is lost")
        batch.send([1], [0])
        with pytest.raises(ServerLost):
            batch.recv()


def test_there_is_no_padding_after_an_interrupt_if_steps_wait_without_limit() -> None:
    rng = random.Random(0)
    lanes = [FakeLane(1, 1, Faults(draw=rng.random, end=1.0)) for _ in range(2)]
    with BatchEnv(lanes, padding_after=math.inf) as batch:
        batch.reset()
        silent, interrupting = (lane.faults for lane in lanes)
        silent.silence, interrupting.interrupt_waiting = 1.0, 1.0
        with pytest.raises(KeyboardInterrupt):
            batch.step([1, 1])
        assert lanes[0].absent
        silent.silence, interrupting.interrupt_waiting = 0.0, 0.0
        assert batch.step([2, 2]).status.tolist() == [Status.LATE, Status.OK]


class EndingLane(FakeLane):
    """A lane whose episodes end in their second step."""

    def _step(self, row: int) -> None:
        super()._step(row)
        self.rows.terminated[row] = self.state[row, 1] == 2
        self.rows.final_observation[0][row] = self.state[row]


def interrupted(lane: FakeLane) -> BatchEnv:
    """Return a batch whose second step was interrupted while it waited."""
    batch = BatchEnv([lane], autoreset="disabled")
    first = batch.reset()
    batch.step(np.full(len(first), 1))
    lane.faults.interrupt_waiting = 1.0
    with pytest.raises(KeyboardInterrupt):
        batch.step(np.full(len(first), 2))
    lane.faults.interrupt_waiting = 0.0
    return batch


def test_the_next_step_returns_the_end_of_an_episode_of_an_interrupted_step() -> None:
    with interrupted(EndingLane(2, 1, Faults(end=1.0))) as batch:
        result = batch.step(np.array([3, 3]))
        assert result.terminated.all()
        assert not result.valid.any()
        assert result.reward.tolist() == [2, 2]
        batch.reset()
        assert batch.step(np.array([4, 4])).valid.all()


def test_a_partial_reset_keeps_the_last_observations_of_the_other_rows() -> None:
    with interrupted(FakeLane(2, 2, Faults(end=1.0))) as batch:
        batch.reset([0])
        assert batch.last_observation()[:, 1].tolist() == [0, 2]
        lane = batch.lanes[0]
        lane.rows.observation[0][1] = 7, 7, 7
        batch._group.absence.mark_late({1})  # as if the block had become absent
        lane.rows.final_observation[0][1] = 1, 2, 3
        assert batch.last_observation()[1].tolist() == [1, 2, 3]
