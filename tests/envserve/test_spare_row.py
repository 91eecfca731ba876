"""Rows with a spare env: the two envs' turns, seeds and faults."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

from envserve.crashes.action_ring import RowRecord
from envserve.envs.seeding import env_seed, spare_seed
from envserve.settings import Autoreset, EnvRequest
from envserve.slab import BEAT_INCREMENT, Rows, private_heartbeat
from envserve.wire.bodies import pack_options
from envserve.worker.env_checks import SpaceViolation
from envserve.worker.env_row import EnvRow
from envserve.worker.spare_row import ResetThreads, SpareRow
from tests.oracle.ledger_env import LedgerEnv

from .conftest import WaitUntil

SEED = env_seed(0, 3, 0)
WAIT = 60.0


class ProbeEnv(LedgerEnv):
    """A ledger env whose resets can block, and that detects concurrent use.

    `gates` maps the number of a reset of this env to the event that it waits for.
    """

    made: list[ProbeEnv]

    def __init__(self, length: int = 2) -> None:
        super().__init__(length)
        self.index = len(ProbeEnv.made)
        ProbeEnv.made.append(self)
        self.gates: dict[int, threading.Event] = {}
        self.entered = threading.Event()
        self.reset_by: list[int] = []
        self.difficulties: list[Any] = []
        self.faults: dict[int, BaseException | str] = {}
        self.closed = 0
        self._busy = threading.Lock()

    def reset(self, **options: Any) -> Any:
        with self._alone():
            count = len(self.reset_by)
            self.reset_by.append(threading.get_ident())
            self.entered.set()
            if count in self.gates:
                assert self.gates[count].wait(WAIT)
            self.difficulties.append(self.difficulty)
            fault = self.faults.get(count)
            if isinstance(fault, BaseException):
                raise fault
            observation, info = super().reset(**options)
            if fault == "wrong_shape":
                observation = observation[:2]
            return observation, {**info, "env": self.index}

    def step(self, action: Any) -> Any:
        with self._alone():
            observation, reward, terminated, truncated, info = super().step(action)
            if action == 666:
                raise RuntimeError("the simulator lost its balance")
            if action == 667:
                reward = float("inf")
            return observation, reward, terminated, truncated, info

    def close(self) -> None:
        self.closed += 1

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise AssertionError("two threads in one env")
        try:
            yield
        finally:
            self._busy.release()


class Bench:
    """A pool's fourth row, its threads, and the arrays that it writes."""

    def __init__(self, autoreset: Autoreset = "same_step", length: int = 2) -> None:
        self.threads = ResetThreads(4)
        request = EnvRequest(
            env_name="Probe-v0",
            env_kwargs={"length": length},
            num_envs=4,
            seed=0,
            autoreset=autoreset,
        )
        self.row = SpareRow(EnvRow(request, 3), EnvRow(request, 3), self.threads)
        spec = self.row.build()
        self.row.build_spare()
        self.envs = ProbeEnv.made
        self.rows = Rows.allocate(spec, 4)
        self.beats = private_heartbeat()
        self.row.attach(self.rows, self.beats, RowRecord.private())

    def reset(self, seed: int | None = None) -> list[int]:
        self.row.reset(seed)
        return self.observed()

    def observed(self) -> list[int]:
        """Return the seed, episode and step that the row observes."""
        seen: list[int] = self.rows.observation[0][3, :3].tolist()
        return seen

    def play(self, action: int = 1) -> list[int]:
        """Play a two-step episode; return the next episode's first observation."""
        assert self.row.step(action)[1:3] == (False, False)
        _, terminated, truncated, _ = self.row.step(action)
        assert terminated is not truncated
        return self.observed()


@pytest.fixture(autouse=True)
def probe_env() -> Iterator[None]:
    ProbeEnv.made = []
    gymnasium.register("Probe-v0", lambda **kwargs: ProbeEnv(**kwargs))
    yield
    del gymnasium.registry["Probe-v0"]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for each in made:
        for env in each.envs:
            for gate in env.gates.values():
                gate.set()
        each.threads.shutdown()


Make = Callable[..., Bench]


@pytest.fixture
def bench(make_bench: Make) -> Bench:
    return make_bench()


# Turns and seeds.


def test_only_the_very_first_reset_is_done_by_the_caller(bench: Bench) -> None:
    bench.reset()
    for _ in range(6):
        bench.play()
    bench.threads.shutdown()
    here = threading.get_ident()
    first, second = (env.reset_by for env in bench.envs)
    assert first[0] == here
    assert here not in [*first[1:], *second]


def test_final_observation_and_infos_are_of_the_ended_episode(bench: Bench) -> None:
    bench.reset()
    bench.row.step(5)
    reward, terminated, truncated, info = bench.row.step(6)
    assert (reward, terminated, truncated) == (6.0, True, False)
    assert bench.rows.final_observation[0][3, :3].tolist() == [SEED, 0, 2]
    assert info["step"] == 2
    assert info["reset_info"] == {"reset_of_episode": 0, "env": 1}


def test_a_step_does_not_wait_for_the_reset_of_the_previous_env(
    bench: Bench, wait_until: WaitUntil
) -> None:
    first = bench.envs[0]
    first.gates[1] = threading.Event()
    bench.reset()
    assert bench.play() == [spare_seed(SEED), 0, 0]
    wait_until(lambda: len(first.reset_by) == 2)
    bench.row.step(1)
    assert first.difficulties == [1], "its second reset has not ended"


def test_a_step_that_needs_the_spare_waits_and_sets_the_slow_flag(
    bench: Bench, wait_until: WaitUntil
) -> None:
    gate = bench.envs[1].gates[0] = threading.Event()
    bench.reset()
    bench.row.step(1)
    assert bench.beats[1] == 0
    beats = bench.beats[0]
    seen: list[Any] = []
    stepping = threading.Thread(target=lambda: seen.append(bench.row.step(1)))
    stepping.start()
    wait_until(lambda: bench.beats[1] == 1)
    assert not seen
    assert bench.beats[0] == beats + 2 * BEAT_INCREMENT, (
        "the step, and the reset that it waits for"
    )
    gate.set()
    stepping.join(WAIT)
    assert seen[0][1] is True
    assert bench.beats[1] == 0
    assert bench.observed() == [spare_seed(SEED), 0, 0]


@pytest.mark.parametrize("is_late", [False, True])
def test_results_do_not_depend_on_when_the_spare_is_ready(
    bench: Bench, wait_until: WaitUntil, is_late: bool
) -> None:
    for env in bench.envs:
        env.gates = {index: threading.Event() for index in range(4)}
    bench.envs[0].gates[0].set()

    def open_gate(gate: threading.Event) -> None:
        wait_until(lambda: not is_late or bool(bench.beats[1]))
        gate.set()

    seen = [bench.reset()]
    for turn in range(1, 8):
        env, count = bench.envs[turn % 2], turn // 2
        helper = threading.Thread(target=open_gate, args=(env.gates[count],))
        helper.start()
        if not is_late:
            wait_until(lambda env=env, count=count: len(env.difficulties) > count)
        seen.append(bench.play(turn))
        helper.join(WAIT)
    spare = spare_seed(SEED)
    assert seen == [[(SEED, spare)[turn % 2], turn // 2, 0] for turn in range(8)]


@pytest.mark.parametrize("options", [None, {}])
def test_a_reset_without_a_seed_uses_the_prepared_spare(
    bench: Bench, options: dict[str, Any] | None
) -> None:
    bench.reset()
    bench.row.step(1)
    for seen in ([spare_seed(SEED), 0, 0], [SEED, 1, 0], [spare_seed(SEED), 1, 0]):
        bench.row.reset(None, pack_options(options))
        assert bench.observed() == seen


@pytest.mark.parametrize("is_first", [True, False])
def test_a_seed_discards_the_prepared_episode(bench: Bench, is_first: bool) -> None:
    if not is_first:
        bench.reset()
        bench.play()
    for _ in range(2):
        seen = [bench.reset(42), bench.play(), bench.play(), bench.play()]
        spare = spare_seed(42)
        assert seen == [[42, 0, 0], [spare, 0, 0], [42, 1, 0], [spare, 1, 0]]


def test_next_step_autoreset_switches_envs_in_the_step_after_the_end(
    make_bench: Make,
) -> None:
    bench = make_bench(autoreset="next_step")
    bench.reset()
    assert bench.play() == [SEED, 0, 2]
    reward, terminated, truncated, info = bench.row.step(9)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"reset_of_episode": 0, "env": 1}
    assert bench.observed() == [spare_seed(SEED), 0, 0]
    bench.row.step(9)
    assert bench.observed() == [spare_seed(SEED), 0, 1]


def test_no_env_is_ever_used_by_two_threads(make_bench: Make) -> None:
    bench = make_bench(length=1)
    bench.reset()
    for turn in range(500):
        if turn % 50 == 7:
            bench.row.reset(turn)
        if turn % 20 == 3:
            bench.row.call("set", "difficulty", [turn])
        bench.row.step(1)  # raises if two threads use an env
    assert bench.row.incarnation == 0


# Attributes.


def test_an_attribute_is_set_on_both_envs_and_read_from_one(bench: Bench) -> None:
    bench.row.call("set", "difficulty", [[4]])
    bench.reset()
    assert bench.row.call("get", "difficulty", []) == [4]
    bench.play()
    assert bench.row.call("get", "difficulty", []) == [4]
    assert bench.row.call("call", "echo", [1]) == [1]
    first, second = (env.unwrapped.difficulty for env in bench.envs)  # type: ignore[attr-defined]
    assert first is not second, "a value that one changes must not change the other's"


def test_an_episode_never_begins_from_a_reset_before_the_last_set(
    bench: Bench, wait_until: WaitUntil
) -> None:
    bench.reset()
    for difficulty in (5, 6):
        bench.row.call("set", "difficulty", [difficulty - 3])
        bench.row.call("set", "difficulty", [difficulty])
        bench.play()
        active = bench.envs[1 if difficulty == 5 else 0]
        assert active.difficulties[-1] == difficulty
        assert bench.row.call("get", "difficulty", []) == difficulty
    # Each env was reset once before the last `set`, and once after it.
    wait_until(lambda: bench.envs[1].difficulties == [1, 5, 6])
    assert bench.envs[0].difficulties == [1, 5, 6]


def test_setting_does_not_wait_for_the_spare(bench: Bench) -> None:
    bench.envs[1].gates[0] = threading.Event()
    bench.reset()
    bench.row.call("set", "difficulty", [8])
    assert bench.envs[1].difficulties == []
    bench.envs[1].gates[0].set()
    bench.play()
    assert bench.envs[1].difficulties == [1, 8]


def test_attributes_are_set_again_on_a_rebuilt_env(bench: Bench) -> None:
    bench.reset()
    bench.row.call("set", "difficulty", [3])
    with pytest.raises(AttributeError):
        bench.row.call("set", "np_random_seed", [3])
    bench.row.rebuild()  # sets all attributes again
    bench.reset()
    assert bench.envs[2].difficulties == [3]


# Faults.


def test_an_exception_of_a_background_reset_is_raised_when_the_row_needs_the_env(
    bench: Bench,
) -> None:
    bench.envs[1].faults[0] = RuntimeError("no level to load")
    bench.reset()
    bench.row.step(1)
    with pytest.raises(RuntimeError, match="no level to load"):
        bench.row.step(1)
    bench.row.rebuild()
    assert bench.row.incarnation == 1
    assert bench.envs[1].closed == 1
    assert bench.reset() == [env_seed(0, 3, 1), 0, 0]
    assert bench.play() == [SEED, 1, 0], "the other env has lost nothing"
    assert bench.play() == [env_seed(0, 3, 1), 1, 0]


def test_a_violation_in_a_background_reset_is_raised_by_the_step(bench: Bench) -> None:
    bench.envs[1].faults[0] = "wrong_shape"
    bench.reset()
    bench.row.step(1)
    with pytest.raises(SpaceViolation, match=r"expected observation int64\[4\]"):
        bench.row.step(1)


def test_a_discarded_episode_does_not_hide_its_fault(bench: Bench) -> None:
    bench.envs[1].faults[0] = RuntimeError("no level to load")
    bench.reset()
    with pytest.raises(RuntimeError, match="no level to load"):
        bench.reset(5)
    bench.row.rebuild()
    assert bench.envs[1].closed == 1
    assert [bench.reset(5), bench.play()] == [[5, 0, 0], [spare_seed(5), 0, 0]]


@pytest.mark.parametrize(
    ("num_steps_before", "action", "error", "text"),
    [
        (0, 666, RuntimeError, "lost its balance"),
        (1, 667, SpaceViolation, "expected a finite reward; got inf"),  # last step
    ],
)
def test_a_failed_step_affects_only_the_active_env(
    bench: Bench, num_steps_before: int, action: int, error: type[Exception], text: str
) -> None:
    bench.reset()
    for _ in range(num_steps_before):
        bench.row.step(1)
    with pytest.raises(error, match=text):
        bench.row.step(action)
    bench.row.rebuild()
    assert [env.closed for env in bench.envs] == [1, 0, 0]
    assert bench.reset() == [env_seed(0, 3, 1), 0, 0]
    assert bench.play() == [spare_seed(SEED), 0, 0]


# Closing.


@pytest.mark.parametrize("is_away", [False, True])
def test_both_envs_are_closed_except_one_in_its_reset(
    bench: Bench, is_away: bool
) -> None:
    spare = bench.envs[1]
    if is_away:
        spare.gates[0] = threading.Event()
    bench.reset()
    assert spare.entered.wait(WAIT)
    if not is_away:
        bench.threads.shutdown()
    bench.row.close()
    assert [env.closed for env in bench.envs] == [1, 0 if is_away else 1]
