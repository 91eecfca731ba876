"""What a pool makes of workers that say the wrong thing: the test plays the worker."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from gymnasium import spaces

from envserve import codec
from envserve.errors import EnvStartError, WorkerError
from envserve.lane import Outcome
from envserve.pool.launcher import Launcher, WorkerProcess
from envserve.pool.pool import Pool
from envserve.pool.states import Exit, WorkerState
from envserve.settings import PoolSettings
from envserve.slab import Status
from envserve.spec import describe
from envserve.worker import channel
from envserve.worker.channel import Channel, Frame, FrameReader, Kind, pack_frame

from .pool_driver import gather, wait_for
from .stalls import soonest

DISCRETE = describe(spaces.Discrete(3))


class FakeWorker:
    """The far end of a worker's socket, with no process behind it."""

    def __init__(self, launcher: FakeLauncher, *wakes: Any) -> None:
        self.was_killed = False
        ours, self.theirs = socket.socketpair()
        number = len(launcher.workers)
        self.process = WorkerProcess(
            cast(Launcher, launcher), number, Channel(ours, *wakes)
        )
        self.process.pid = 1000 + number
        self.theirs.settimeout(40.0)
        self._reader = FrameReader()
        self._frames: list[Frame] = []

    def receive(self) -> Frame:
        while not self._frames:
            self._frames += self._reader.feed(self.theirs.recv(1 << 16))
        return self._frames.pop(0)

    def take_over(self, pool: Pool, *kinds: Kind) -> None:
        """Answers what a pool asks of the successor of a worker that was lost."""
        self.theirs.setblocking(False)
        for kind in kinds:
            give_up_at = time.monotonic() + 40.0
            while not self._frames:
                assert time.monotonic() < give_up_at, f"waited 40 s for {kind!r}"
                assert pool.collect(0.01) == []
                with contextlib.suppress(BlockingIOError):
                    self._frames += self._reader.feed(self.theirs.recv(1 << 16))
            assert self._frames[0].kind is kind
            self.answer()
        self.theirs.settimeout(40.0)

    def send(self, *frame: Any) -> None:
        self.theirs.sendall(pack_frame(*frame))

    def answer(self, payload: bytes = b"") -> None:
        frame = self.receive()
        self.send(Kind.DONE, frame.block, frame.sequence, payload)

    def become_ready(self, action: dict[str, Any] = DISCRETE) -> None:
        assert self.receive().kind is Kind.BUILD
        both = {"observation": DISCRETE, "action": action}
        self.send(Kind.READY, 0, 0, codec.encode(both))

    def close(self) -> None:
        self.theirs.close()

    def exit(self, code: int) -> None:
        self.process.exit = Exit(1000, code)

    def die(self, code: int) -> None:
        self.close()
        self.exit(code)


class FakeLauncher:
    """Starts fake workers; what it kills is dead at once."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.can_kill = True
        self.reserve = contextlib.nullcontext()  # of descriptors

    def launch(self, selector: selectors.BaseSelector, owner: object) -> WorkerProcess:
        worker = FakeWorker(self, selector, owner)
        self.workers.append(worker)
        return worker.process

    def kill(self, process: WorkerProcess, *, has_stack: bool = False) -> None:
        self.workers[process.number].was_killed = True
        if self.can_kill:
            self.workers[process.number].die(-9)

    def poll(self) -> None:
        """Exits are reported by the test itself."""


class Scene:
    """A pool of two envs over fake workers, reset and in the middle of a step."""

    def __init__(self, num_workers: int = 1, num_splits: int = 2) -> None:
        self.launcher = FakeLauncher()
        self.seconds_gone = 0.0
        config = PoolSettings(
            env_name="Fake-v0",
            num_envs=2,
            num_workers=num_workers,
            num_splits=num_splits,
            seed=0,
            max_restarts=2,
            max_infos_kib=64,
        )
        self.pool = Pool(
            config,
            launcher=cast(Launcher, self.launcher),
            clock=lambda: time.monotonic() + self.seconds_gone,
        )

    @property
    def worker(self) -> FakeWorker:
        return self.launcher.workers[-1]

    def start_step(self) -> Frame:
        self.worker.become_ready()
        wait_for(self.pool, lambda: self.pool.is_ready)
        assert self.worker.receive().kind is Kind.SLAB
        self.pool.submit_step([0])
        frame = self.worker.receive()
        assert frame.kind is Kind.STEP
        return frame

    def replace(
        self, culprit: FakeWorker, action: dict[str, Any] = DISCRETE
    ) -> FakeWorker:
        """Waits for the next worker, and has it take over."""
        wait_for(self.pool, lambda: self.worker is not culprit)
        self.worker.become_ready(action)
        if action is DISCRETE:
            state = self.pool._workers.all[0]
            wait_for(self.pool, lambda: state.state is WorkerState.SERVING)
            assert self.worker.receive().kind is Kind.SLAB
        return self.worker

    def lose(self, culprit: FakeWorker) -> Outcome:
        """What the step has come to, once the next worker has taken over."""
        self.replace(culprit).take_over(self.pool, Kind.RESET)
        (outcome,) = gather(self.pool, [0])
        assert self.pool.rows.status[0] == Status.WORKER_DIED
        assert self.pool.rows.truncated[0]
        return outcome


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


def fault(**changes: Any) -> dict[str, Any]:
    return {"row": 0, "status": 1, "text": "", "violation": False} | changes


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


WRONG: dict[str, Callable[[Frame], bytes]] = {
    "no frame": lambda frame: b"\xff" * 64,
    "endless frame": lambda frame: b"\x09" + b"\xff" * 11,
    "long traceback": lambda frame: channel.HEADER.pack(Kind.FAILED, 0, 0, 1 << 20),
    "text": lambda frame: b"Traceback (most recent call last):\n",
    "another number": lambda frame: pack_frame(Kind.DONE, 0, frame.sequence + 1),
    "an old number": lambda frame: pack_frame(Kind.DONE, 0, frame.sequence - 1),
    "idle block": lambda frame: pack_frame(Kind.DONE, 1, frame.sequence),
    "no block": lambda frame: pack_frame(Kind.DONE, 9, frame.sequence),
    "ready again": lambda frame: pack_frame(Kind.READY),
    "a command": lambda frame: pack_frame(Kind.STEP, 0, frame.sequence),
    **{
        f"report {name}": lambda frame, payload=payload: pack_frame(  # type: ignore[misc]
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
            "of half a fault": report(faults=[{"row": 0}]),
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
