"""What a pool makes of workers that say the wrong thing: the test plays the worker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gymnasium import spaces

from envserve.errors import EnvStartError, WorkerError
from envserve.lane import Outcome
from envserve.pool.worker_states import WorkerState
from envserve.slab import Status
from envserve.spaces import codec
from envserve.spaces.env_spec import describe
from envserve.worker import channel
from envserve.worker.channel import ChannelMessage, Kind, pack_message

from .fake_workers import DISCRETE, Scene
from .pool_driver import gather, wait_for
from .stalls import soonest


@contextlib.contextmanager
def playing() -> Iterator[Scene]:
    made = Scene()
    yield made
    for worker in made.launcher.workers:
        with contextlib.suppress(OSError):
            worker.die(0)
    made.pool.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with playing() as made:
        yield made


def report(**changes: Any) -> bytes:
    plain: dict[str, Any] = {"faults": [], "infos": {}, "rebuilt": []}
    return codec.encode(plain | changes)


def fault(row: int = 0, status: int = 1) -> list[Any]:
    return [row, status, "", False]


def test_answer_with_the_right_number_finishes_the_step(scene: Scene) -> None:
    frame = scene.start_step()
    scene.worker.send(Kind.DONE, 0, frame.sequence)
    assert gather(scene.pool, [0]) == [Outcome(0)]


def test_every_submission_has_another_number(scene: Scene) -> None:
    numbers = {scene.start_step().sequence}
    scene.worker.send(Kind.DONE, 0, max(numbers))
    gather(scene.pool, [0])
    scene.pool.submit_step([1, 0])
    numbers |= {scene.worker.receive().sequence, scene.worker.receive().sequence}
    assert len(numbers) == 3


WRONG: dict[str, Callable[[ChannelMessage], bytes]] = {
    "no frame": lambda frame: b"\xff" * 64,
    "endless frame": lambda frame: b"\x09" + b"\xff" * 11,
    "long traceback": lambda frame: channel.HEADER.pack(Kind.FAILED, 0, 0, 1 << 20),
    "text": lambda frame: b"Traceback (most recent call last):\n",
    "another number": lambda frame: pack_message(Kind.DONE, 0, frame.sequence + 1),
    "an old number": lambda frame: pack_message(Kind.DONE, 0, frame.sequence - 1),
    "idle block": lambda frame: pack_message(Kind.DONE, 1, frame.sequence),
    "no block": lambda frame: pack_message(Kind.DONE, 9, frame.sequence),
    "ready again": lambda frame: pack_message(Kind.READY),
    "a command": lambda frame: pack_message(Kind.STEP, 0, frame.sequence),
    **{
        f"report {name}": lambda frame, payload=payload: pack_message(  # type: ignore[misc]
            Kind.DONE, 0, frame.sequence, payload
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


@pytest.mark.parametrize("name", WRONG)
def test_worker_that_says_the_wrong_thing_is_replaced(scene: Scene, name: str) -> None:
    frame = scene.start_step()
    culprit = scene.worker
    culprit.theirs.sendall(WRONG[name](frame))
    outcome = scene.lose(culprit)
    assert culprit.was_killed
    (lost,) = outcome.faults
    assert "sent " in lost.text or "answered what was not asked" in lost.text
    assert lost.text.endswith("it was killed by SIGKILL")


def test_report_on_the_reset_of_a_lost_block_is_checked_too(scene: Scene) -> None:
    scene.start_step()
    first = scene.worker
    first.die(1)
    second = scene.replace(first)
    second.answer(report(rebuilt=[1]))  # a row of another block
    scene.lose(second)
    assert second.was_killed


def test_a_move_that_the_table_does_not_have_is_an_error(scene: Scene) -> None:
    scene.start_step()
    (worker,) = scene.pool._workers.all
    with pytest.raises(AssertionError, match=r"SERVING.* cannot become STARTING"):
        worker._move(WorkerState.STARTING)
    assert worker.state is WorkerState.SERVING


def test_second_answer_to_the_same_step_is_a_wrong_one(scene: Scene) -> None:
    frame = scene.start_step()
    culprit = scene.worker
    for _ in range(2):
        culprit.send(Kind.DONE, 0, frame.sequence)
    assert gather(scene.pool, [0]) == [Outcome(0)]
    scene.replace(culprit)
    assert culprit.was_killed


def test_answer_written_before_the_end_still_counts(scene: Scene) -> None:
    frame = scene.start_step()
    scene.worker.send(Kind.DONE, 0, frame.sequence)
    scene.worker.die(1)
    assert gather(scene.pool, [0]) == [Outcome(0)]
    assert scene.pool.rows.status[0] == Status.OK


def test_traceback_is_not_missed_when_the_pool_writes_first(scene: Scene) -> None:
    scene.start_step()
    culprit = scene.worker
    culprit.send(Kind.FAILED, 0, 0, b"Traceback: no licence")
    culprit.die(0)
    scene.pool.submit_step([1])
    scene.replace(culprit).take_over(scene.pool, *[Kind.RESET] * 2)
    for outcome in gather(scene.pool, [0, 1]):
        assert "Traceback: no licence" in outcome.faults[0].text


@pytest.mark.parametrize("comes_first", ["end of file", "exit status"])
def test_death_is_told_once_it_has_both_signs(scene: Scene, comes_first: str) -> None:
    scene.start_step()
    culprit = scene.worker
    culprit.close() if comes_first == "end of file" else culprit.exit(-11)
    assert scene.pool.collect(0.0) == []
    assert scene.worker is culprit
    culprit.exit(-11) if comes_first == "end of file" else culprit.close()
    (lost,) = scene.lose(culprit).faults
    assert lost.text == "worker 0 (of envs 0 to 0, 1 to 1) was killed by SIGSEGV"


def test_end_of_file_without_an_end_is_made_one(scene: Scene) -> None:
    scene.start_step()
    culprit = scene.worker
    culprit.close()
    (lost,) = scene.lose(culprit).faults
    assert culprit.was_killed
    text = "closed its socket without ending; it was killed by SIGKILL"
    assert lost.text.endswith(text)


@pytest.mark.parametrize("sign", ["end of file", "wrong answer"])
def test_worker_that_cannot_be_killed_is_given_up_and_never_replaced(
    scene: Scene, sign: str
) -> None:
    frame = scene.start_step()
    culprit = scene.worker
    scene.launcher.can_kill = False
    if sign == "end of file":
        culprit.close()
    else:
        culprit.send(Kind.DONE, 0, frame.sequence + 1)
    wait_for(scene.pool, lambda: culprit.was_killed)
    # Since then, however long this test was kept from the processor.
    scene.seconds_gone = culprit.process._killed_at + 2.0 - time.monotonic()
    assert scene.pool.collect(0.1) == []
    scene.seconds_gone += 3.0
    (outcome,) = gather(scene.pool, [0])
    assert isinstance(outcome.error, WorkerError)
    assert "its process 1000 was killed, but has not ended" in str(outcome.error)
    scene.pool.submit_step([1])
    (outcome,) = gather(scene.pool, [1])
    assert isinstance(outcome.error, WorkerError)
    assert scene.worker is culprit


def test_closing_does_not_wait_for_worker_that_cannot_be_killed() -> None:
    def attempt() -> float:
        with playing() as scene:
            scene.start_step()
            scene.launcher.can_kill = False
            began = time.monotonic()
            scene.pool.close()
            seconds = time.monotonic() - began
            assert scene.pool.is_closed
        return seconds

    assert soonest(attempt, 4.0) < 4.0


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
    scene: Scene, payload: bytes
) -> None:
    workers = scene.launcher.workers
    wait_for(scene.pool, lambda: len(workers) == 1)
    assert workers[0].receive().kind is Kind.BUILD
    workers[0].send(Kind.READY, 0, 0, payload)
    wait_for(scene.pool, lambda: scene.pool.error is not None)
    assert "failed to get its" in str(scene.pool.error)
    assert "sent spaces that cannot be read" in str(scene.pool.error)
    assert [worker.was_killed for worker in workers] == [True]


def test_worker_that_comes_back_with_other_spaces_is_killed(scene: Scene) -> None:
    scene.start_step()
    first = scene.worker
    first.die(1)
    second = scene.replace(first, action=describe(spaces.Discrete(4)))
    assert len(scene.lose(second).faults) == 1
    assert second.was_killed


def test_workers_of_different_spaces_are_an_error_that_names_them() -> None:
    scene = Scene(num_workers=2, num_splits=1)
    first, second = scene.launcher.workers
    first.become_ready()
    second.become_ready(describe(spaces.Discrete(4)))
    wait_for(scene.pool, lambda: scene.pool.error is not None)
    assert isinstance(scene.pool.error, EnvStartError)
    text = "worker 1 (of envs 1 to 1) has other spaces than the first worker: "
    assert text + "action space: expected Discrete(3), got Discrete(4)" in str(
        scene.pool.error
    )
    first.die(0)
    second.die(0)
    scene.pool.close()
