"""A pool's reaction to misbehaving workers, which are fakes that tests control."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gymnasium import spaces

from envserve.errors import EnvError, EnvStartError, WorkerError
from envserve.lane import Outcome
from envserve.pool.worker_states import Exit, WorkerState
from envserve.slab import Status
from envserve.spaces import codec
from envserve.spaces.env_spec import describe
from envserve.worker import channel
from envserve.worker.channel import ChannelMessage, MessageKind, pack_message

from .fake_workers import DISCRETE, PoolOfFakeWorkers
from .pool_driver import gather, wait_for
from .stalls import fastest


@pytest.fixture
def fake_pool() -> Iterator[PoolOfFakeWorkers]:
    with contextlib.closing(PoolOfFakeWorkers()) as made:
        yield made


def report(**changes: Any) -> bytes:
    plain: dict[str, Any] = {"faults": [], "infos": {}, "rebuilt": [], "warnings": []}
    return codec.encode(plain | changes)


def fault(row: int = 0, status: int = 1) -> list[Any]:
    return [row, status, "", False]


def test_every_submission_has_a_new_sequence_number(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    numbers = {fake_pool.start_step().sequence}
    fake_pool.worker.send(MessageKind.DONE, 0, max(numbers))
    assert gather(fake_pool.pool, [0]) == [Outcome(0)]
    fake_pool.pool.submit_step([1, 0])
    numbers |= {
        fake_pool.worker.receive().sequence,
        fake_pool.worker.receive().sequence,
    }
    assert len(numbers) == 3


INVALID_MESSAGES: dict[str, Callable[[ChannelMessage], bytes]] = {
    "no message": lambda message: b"\xff" * 64,
    "endless message": lambda message: b"\x09" + b"\xff" * 11,
    "long traceback": lambda message: channel.HEADER.pack(
        MessageKind.FAILED, 0, 0, 1 << 20
    ),
    "text": lambda message: b"Traceback (most recent call last):\n",
    "another number": lambda message: pack_message(
        MessageKind.DONE, 0, message.sequence + 1
    ),
    "an old number": lambda message: pack_message(
        MessageKind.DONE, 0, message.sequence - 1
    ),
    "idle block": lambda message: pack_message(MessageKind.DONE, 1, message.sequence),
    "no block": lambda message: pack_message(MessageKind.DONE, 9, message.sequence),
    "ready again": lambda message: pack_message(MessageKind.READY),
    "a command": lambda message: pack_message(MessageKind.STEP, 0, message.sequence),
    **{
        f"report {name}": lambda message, payload=payload: pack_message(  # type: ignore[misc]
            MessageKind.DONE, 0, message.sequence, payload
        )
        for name, payload in {
            "of garbage": b"\xff\xff",
            "that is a list": codec.encode([1]),
            "without infos": codec.encode({"faults": [], "rebuilt": []}),
            "of a far row": report(faults=[fault(row=10**9)]),
            "of another block": report(faults=[fault(row=1)]),
            "of a negative row": report(rebuilt=[-1]),
            "of a named row": report(infos={"x": {}}),
            "of a list as row": report(rebuilt=[[0]]),
            "of no status": report(faults=[fault(status=77)]),
            "of half a fault": report(faults=[[0]]),
            "of no list": report(faults=3),
            "of too many bytes": report(infos={0: {"": bytes(180 << 10)}}),
            "of too many values": report(infos={0: {"": [[]] * 20_000}}),
        }.items()
    },
}


@pytest.mark.parametrize("name", INVALID_MESSAGES)
def test_worker_that_sends_an_invalid_message_is_replaced(
    fake_pool: PoolOfFakeWorkers, name: str
) -> None:
    message = fake_pool.start_step()
    culprit = fake_pool.worker
    culprit.theirs.sendall(INVALID_MESSAGES[name](message))
    outcome = fake_pool.replace_and_collect(culprit)
    assert culprit.was_killed
    (lost,) = outcome.faults
    assert (
        "sent " in lost.text
        or "replied to an operation that was not submitted" in lost.text
    )
    assert lost.text.endswith("it was killed by SIGKILL")


def test_report_on_the_reset_of_a_lost_block_is_checked_too(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    fake_pool.start_step()
    first = fake_pool.worker
    first.die(1)
    second = fake_pool.replace(first)
    second.reply(report(rebuilt=[1]))  # row 1 is in the other block
    fake_pool.replace_and_collect(second)
    assert second.was_killed


def test_a_transition_that_is_not_in_the_table_is_an_error(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    fake_pool.start_step()
    worker = fake_pool.supervised
    with pytest.raises(AssertionError, match=r"SERVING.* cannot change to STARTING"):
        worker._set_state(WorkerState.STARTING)
    assert worker.state is WorkerState.SERVING


def test_a_reply_to_an_operation_of_another_worker_is_invalid() -> None:
    with contextlib.closing(PoolOfFakeWorkers(num_workers=2, num_splits=1)) as made:
        culprit, other = made.launcher.workers
        for worker in (culprit, other):
            worker.become_ready()
        wait_for(made.pool, lambda: made.pool.is_ready)
        assert other.receive().kind is MessageKind.SLAB
        made.pool.submit_step([1])
        step = other.receive()
        culprit.send(MessageKind.DONE, 1, step.sequence)
        wait_for(made.pool, lambda: culprit.was_killed)
        other.send(MessageKind.DONE, 1, step.sequence)
        assert gather(made.pool, [1]) == [Outcome(1)]


def test_second_reply_to_the_same_step_is_invalid(fake_pool: PoolOfFakeWorkers) -> None:
    message = fake_pool.start_step()
    culprit = fake_pool.worker
    for _ in range(2):
        culprit.send(MessageKind.DONE, 0, message.sequence)
    assert gather(fake_pool.pool, [0]) == [Outcome(0)]
    fake_pool.replace(culprit)
    assert culprit.was_killed


def test_reply_written_before_the_end_still_counts(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    message = fake_pool.start_step()
    fake_pool.worker.send(MessageKind.DONE, 0, message.sequence)
    fake_pool.worker.die(1)
    assert gather(fake_pool.pool, [0]) == [Outcome(0)]
    assert fake_pool.pool.rows.status[0] == Status.OK


def test_traceback_is_reported_although_the_pool_has_written_first(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    fake_pool.start_step()
    culprit = fake_pool.worker
    culprit.send(MessageKind.FAILED, 0, 0, b"Traceback: no licence")
    culprit.die(0)
    fake_pool.pool.submit_step([1])
    fake_pool.replace(culprit).take_over(fake_pool.pool, *[MessageKind.RESET] * 2)
    for outcome in gather(fake_pool.pool, [0, 1]):
        assert "Traceback: no licence" in outcome.faults[0].text


@pytest.mark.parametrize("comes_first", ["end of file", "exit status"])
def test_death_is_reported_once_both_signs_are_there(
    fake_pool: PoolOfFakeWorkers, comes_first: str
) -> None:
    fake_pool.start_step()
    culprit = fake_pool.worker
    culprit.close() if comes_first == "end of file" else culprit.exit(-11)
    assert fake_pool.pool.collect(0.0) == []
    assert fake_pool.worker is culprit
    culprit.exit(-11) if comes_first == "end of file" else culprit.close()
    (lost,) = fake_pool.replace_and_collect(culprit).faults
    assert lost.text == "worker 0 (envs 0, 1) was killed by SIGSEGV"


def test_worker_that_closes_its_socket_without_exiting_is_killed(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    fake_pool.start_step()
    culprit = fake_pool.worker
    culprit.close()
    (lost,) = fake_pool.replace_and_collect(culprit).faults
    assert culprit.was_killed
    text = "closed its socket without exiting; it was killed by SIGKILL"
    assert lost.text.endswith(text)


@pytest.mark.parametrize("sign", ["end of file", "wrong reply"])
def test_worker_that_cannot_be_killed_fails_and_is_never_replaced(
    fake_pool: PoolOfFakeWorkers, sign: str
) -> None:
    message = fake_pool.start_step()
    culprit = fake_pool.worker
    fake_pool.launcher.can_kill = False
    if sign == "end of file":
        culprit.close()
    else:
        culprit.send(MessageKind.DONE, 0, message.sequence + 1)
    wait_for(fake_pool.pool, lambda: culprit.was_killed)
    # Count from the kill, however long this test has waited for the CPU.
    fake_pool.extra_seconds = culprit.process._killed_at + 2.0 - time.monotonic()
    assert fake_pool.pool.collect(0.1) == []
    fake_pool.extra_seconds += 3.0
    (outcome,) = gather(fake_pool.pool, [0])
    assert isinstance(outcome.error, WorkerError)
    assert "its process 1000 was killed, but did not exit" in str(outcome.error)
    fake_pool.pool.submit_step([1])
    (outcome,) = gather(fake_pool.pool, [1])
    assert isinstance(outcome.error, WorkerError)
    assert fake_pool.worker is culprit


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failed_worker_stays_failed_if_the_pool_is_invalidated(
    fake_pool: PoolOfFakeWorkers, is_lost: bool
) -> None:
    """The interrupt may come before the pool has processed the worker's exit."""
    fake_pool.start_step()
    culprit, failed = fake_pool.worker, fake_pool.supervised
    failed.error = EnvError("every step has failed")
    if is_lost:
        culprit.die(-9)
        assert failed.read(time.monotonic())  # the interrupt loses these events
    else:
        fake_pool.launcher.can_kill = False
        failed.replace("every step has failed", time.monotonic())
        culprit.exit(-9)
    fake_pool.pool.invalidate("a call was interrupted")
    fake_pool.pool.submit_step([0, 1])
    for outcome in gather(fake_pool.pool, [0, 1]):
        assert isinstance(outcome.error, EnvError)
    assert fake_pool.pool.stats() == {"restarts": 0}


def test_a_worker_that_is_not_forked_yet_is_replaced_without_waiting(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    fake_pool.start_step()
    first = fake_pool.worker
    first.die(1)
    wait_for(fake_pool.pool, lambda: fake_pool.worker is not first)
    second, fake_pool.launcher.can_kill = fake_pool.worker, False
    second.process.pid = None
    fake_pool.pool.invalidate("a call was interrupted")
    fake_pool.pool.submit_step([0])
    assert len(fake_pool.replace_and_collect(second).faults) == 1


def test_a_lack_of_resources_for_a_minute_is_no_failure_of_the_env(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    fake_pool.start_step()
    fake_pool.worker.die(1)
    fake_pool.launcher.num_failing = 5  # more than `max_restarts`
    no_memory = Exit(0, 1, "Cannot allocate memory", lacks_resources=True)
    previous = fake_pool.worker
    for _ in range(5):
        while fake_pool.worker is previous:
            assert fake_pool.pool.collect(0.0) == []
            fake_pool.extra_seconds += 1.0
        previous = fake_pool.worker
        previous.close()
        previous.process.exit = no_memory
    assert fake_pool.pool.collect(0.0) == []
    fake_pool.extra_seconds += 30.0
    fake_pool.replace_and_collect(previous)


def test_a_lack_of_resources_for_minutes_ends_a_worker(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    fake_pool.start_step()
    fake_pool.worker.die(1)
    fake_pool.launcher.num_failing = 1000
    outcomes: list[Outcome] = []
    while not outcomes:
        outcomes = fake_pool.pool.collect(0.0)
        fake_pool.extra_seconds += 1.0
    assert isinstance(outcomes[0].error, WorkerError)
    assert "could not be started: Too many open files" in str(outcomes[0].error)
    assert 60.0 < fake_pool.extra_seconds < 600.0


def test_the_time_before_a_worker_is_forked_does_not_count_as_building_an_env(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    """The template imports modules during this time."""
    for pid, seconds, was_killed in (
        (None, 500.0, False),
        (1000, 50.0, False),
        (1000, 50.0, False),
        (1000, 50.0, True),
    ):
        fake_pool.worker.process.pid = pid
        fake_pool.extra_seconds += seconds
        assert fake_pool.pool.collect(0.0) == []
        assert fake_pool.worker.was_killed is was_killed


def test_closing_does_not_wait_for_worker_that_cannot_be_killed() -> None:
    def attempt() -> float:
        with contextlib.closing(PoolOfFakeWorkers()) as fake_pool:
            fake_pool.start_step()
            fake_pool.launcher.can_kill = False
            began = time.monotonic()
            fake_pool.pool.close()
            seconds = time.monotonic() - began
            assert fake_pool.pool.is_closed
        return seconds

    assert fastest(attempt, 4.0) < 4.0


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        codec.encode([1]),
        codec.encode({"observation": DISCRETE}),
        codec.encode({"observation": DISCRETE, "action": {"kind": "film"}}),
    ],
    ids=["empty", "garbage", "list", "no action", "unknown"],
)
def test_worker_whose_spaces_cannot_be_read_is_an_error_at_once(
    fake_pool: PoolOfFakeWorkers, payload: bytes
) -> None:
    workers = fake_pool.launcher.workers
    wait_for(fake_pool.pool, lambda: len(workers) == 1)
    assert workers[0].receive().kind is MessageKind.BUILD
    workers[0].send(MessageKind.READY, 0, 0, payload)
    wait_for(fake_pool.pool, lambda: fake_pool.pool.error is not None)
    assert "failed to run" in str(fake_pool.pool.error)
    assert "sent spaces that cannot be read" in str(fake_pool.pool.error)
    assert [worker.was_killed for worker in workers] == [True]


def test_worker_that_comes_back_with_other_spaces_is_killed(
    fake_pool: PoolOfFakeWorkers,
) -> None:
    fake_pool.start_step()
    first = fake_pool.worker
    first.die(1)
    second = fake_pool.replace(first, action=describe(spaces.Discrete(4)))
    assert len(fake_pool.replace_and_collect(second).faults) == 1
    assert second.was_killed


def test_workers_with_different_spaces_are_an_error_that_names_them() -> None:
    fake_pool = PoolOfFakeWorkers(num_workers=2, num_splits=1)
    first, second = fake_pool.launcher.workers
    first.become_ready()
    second.become_ready(describe(spaces.Discrete(4)))
    wait_for(fake_pool.pool, lambda: fake_pool.pool.error is not None)
    assert isinstance(fake_pool.pool.error, EnvStartError)
    text = "the spaces of worker 1 (env 1) differ from those of the first worker: "
    assert text + "action space: expected Discrete(3), got Discrete(4)" in str(
        fake_pool.pool.error
    )
    fake_pool.close()
