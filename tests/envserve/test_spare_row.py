"""Two envs that take turns: whose turn it is, with which seed, and after a fault."""

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
from envserve.slab import BEAT, Rows, private_heartbeat
from envserve.worker.env_checks import SpaceViolation
from envserve.worker.env_row import EnvRow
from envserve.worker.spare_row import ResetThreads, SpareRow
from tests.oracle.ledger_env import LedgerEnv

from .conftest import WaitUntil

SEED = env_seed(0, 3, 0)
WAIT = 60.0


class ProbeEnv(LedgerEnv):
    """A ledger whose resets wait at a gate, and that notices two threads at once.

    `gates` has one per reset, counted over this env's life; there is none by default.
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
    """A row of three before it, its threads, and where it writes."""

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
        """Seed, episode and step that the row shows."""
        seen: list[int] = self.rows.observation[0][3, :3].tolist()
        return seen

    def play(self, action: int = 1) -> list[int]:
        """Plays an episode of two steps; returns what the next one begins with."""
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
def bench() -> Iterator[Callable[..., Bench]]:
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
def table(bench: Make) -> Bench:
    return bench()


# Turns and seeds.


def test_only_the_very_first_reset_is_done_by_the_caller(table: Bench) -> None:
    table.reset()
    for _ in range(6):
        table.play()
    table.threads.shutdown()
    here = threading.get_ident()
    first, second = (env.reset_by for env in table.envs)
    assert first[0] == here
    assert here not in [*first[1:], *second]


def test_final_observation_and_infos_are_of_the_ended_episode(table: Bench) -> None:
    table.reset()
    table.row.step(5)
    reward, terminated, truncated, info = table.row.step(6)
    assert (reward, terminated, truncated) == (6.0, True, False)
    assert table.rows.final_observation[0][3, :3].tolist() == [SEED, 0, 2]
    assert info["step"] == 2
    assert info["reset_info"] == {"reset_of_episode": 0, "env": 1}


def test_a_step_does_not_wait_for_the_env_that_is_relieved(
    table: Bench, wait_until: WaitUntil
) -> None:
    first = table.envs[0]
    first.gates[1] = threading.Event()
    table.reset()
    assert table.play() == [spare_seed(SEED), 0, 0]
    wait_until(lambda: len(first.reset_by) == 2)
    table.row.step(1)
    assert first.difficulties == [1], "its second reset has not ended"


def test_a_step_that_needs_the_spare_waits_and_says_that_it_may_take_long(
    table: Bench, wait_until: WaitUntil
) -> None:
    gate = table.envs[1].gates[0] = threading.Event()
    table.reset()
    table.row.step(1)
    assert table.beats[1] == 0
    beats = table.beats[0]
    seen: list[Any] = []
    stepping = threading.Thread(target=lambda: seen.append(table.row.step(1)))
    stepping.start()
    wait_until(lambda: table.beats[1] == 1)
    assert not seen
    assert table.beats[0] == beats + 2 * BEAT, (
        "the step, and the reset that it waits for"
    )
    gate.set()
    stepping.join(WAIT)
    assert seen[0][1] is True
    assert table.beats[1] == 0
    assert table.observed() == [spare_seed(SEED), 0, 0]


@pytest.mark.parametrize("is_late", [False, True])
def test_being_ready_early_or_late_decides_nothing(
    table: Bench, wait_until: WaitUntil, is_late: bool
) -> None:
    for env in table.envs:
        env.gates = {index: threading.Event() for index in range(4)}
    table.envs[0].gates[0].set()

    def open_gate(gate: threading.Event) -> None:
        wait_until(lambda: not is_late or bool(table.beats[1]))
        gate.set()

    seen = [table.reset()]
    for turn in range(1, 8):
        env, count = table.envs[turn % 2], turn // 2
        helper = threading.Thread(target=open_gate, args=(env.gates[count],))
        helper.start()
        if not is_late:
            wait_until(lambda env=env, count=count: len(env.difficulties) > count)
        seen.append(table.play(turn))
        helper.join(WAIT)
    spare = spare_seed(SEED)
    assert seen == [[(SEED, spare)[turn % 2], turn // 2, 0] for turn in range(8)]


def test_a_reset_without_a_seed_takes_what_is_ready(table: Bench) -> None:
    table.reset()
    table.row.step(1)
    assert table.reset() == [spare_seed(SEED), 0, 0]
    assert table.reset() == [SEED, 1, 0]
    assert table.reset() == [spare_seed(SEED), 1, 0]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_given_seed_drops_what_was_ready(table: Bench, is_first: bool) -> None:
    if not is_first:
        table.reset()
        table.play()
    for _ in range(2):
        seen = [table.reset(42), table.play(), table.play(), table.play()]
        spare = spare_seed(42)
        assert seen == [[42, 0, 0], [spare, 0, 0], [42, 1, 0], [spare, 1, 0]]


def test_next_step_autoreset_takes_turns_in_the_step_after_it(bench: Make) -> None:
    table = bench(autoreset="next_step")
    table.reset()
    assert table.play() == [SEED, 0, 2]
    reward, terminated, truncated, info = table.row.step(9)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"reset_of_episode": 0, "env": 1}
    assert table.observed() == [spare_seed(SEED), 0, 0]
    table.row.step(9)
    assert table.observed() == [spare_seed(SEED), 0, 1]


def test_no_env_is_ever_in_two_threads(bench: Make) -> None:
    table = bench(length=1)
    table.reset()
    for turn in range(500):
        if turn % 50 == 7:
            table.row.reset(turn)
        if turn % 20 == 3:
            table.row.call("set", "difficulty", [turn])
        table.row.step(1)  # the envs raise if it happens
    assert table.row.incarnation == 0


# Attributes.


def test_an_attribute_is_set_on_both_envs_and_got_from_one(table: Bench) -> None:
    table.row.call("set", "difficulty", [[4]])
    table.reset()
    assert table.row.call("get", "difficulty", []) == [4]
    table.play()
    assert table.row.call("get", "difficulty", []) == [4]
    assert table.row.call("call", "echo", [1]) == [1]
    first, second = (env.unwrapped.difficulty for env in table.envs)  # type: ignore[attr-defined]
    assert first is not second, "a value that one changes must not change the other's"


def test_an_episode_never_begins_from_a_reset_before_the_last_set(
    table: Bench, wait_until: WaitUntil
) -> None:
    table.reset()
    for difficulty in (5, 6):
        table.row.call("set", "difficulty", [difficulty - 3])
        table.row.call("set", "difficulty", [difficulty])
        table.play()
        active = table.envs[1 if difficulty == 5 else 0]
        assert active.difficulties[-1] == difficulty
        assert table.row.call("get", "difficulty", []) == difficulty
    # Each has been reset once in vain, before the set that followed.
    wait_until(lambda: table.envs[1].difficulties == [1, 5, 6])
    assert table.envs[0].difficulties == [1, 5, 6]


def test_setting_does_not_wait_for_the_spare(table: Bench) -> None:
    table.envs[1].gates[0] = threading.Event()
    table.reset()
    table.row.call("set", "difficulty", [8])
    assert table.envs[1].difficulties == []
    table.envs[1].gates[0].set()
    table.play()
    assert table.envs[1].difficulties == [1, 8]


def test_what_could_be_set_survives_the_rebuilding_of_its_env(table: Bench) -> None:
    table.reset()
    table.row.call("set", "difficulty", [3])
    with pytest.raises(AttributeError):
        table.row.call("set", "np_random_seed", [3])
    table.row.rebuild()  # sets all that has been set
    table.reset()
    assert table.envs[2].difficulties == [3]


# Faults.


def test_what_a_reset_raises_shows_only_when_the_row_needs_it(table: Bench) -> None:
    table.envs[1].faults[0] = RuntimeError("no level to load")
    table.reset()
    table.row.step(1)
    with pytest.raises(RuntimeError, match="no level to load"):
        table.row.step(1)
    table.row.rebuild()
    assert table.row.incarnation == 1
    assert table.envs[1].closed == 1
    assert table.reset() == [env_seed(0, 3, 1), 0, 0]
    assert table.play() == [SEED, 1, 0], "the other env has lost nothing"
    assert table.play() == [env_seed(0, 3, 1), 1, 0]


def test_a_violation_in_the_reset_of_a_spare_is_one_of_the_row(table: Bench) -> None:
    table.envs[1].faults[0] = "wrong_shape"
    table.reset()
    table.row.step(1)
    with pytest.raises(SpaceViolation, match=r"expected observation int64\[4\]"):
        table.row.step(1)


def test_what_was_dropped_for_a_seed_does_not_hide_its_fault(table: Bench) -> None:
    table.envs[1].faults[0] = RuntimeError("no level to load")
    table.reset()
    with pytest.raises(RuntimeError, match="no level to load"):
        table.reset(5)
    table.row.rebuild()
    assert table.envs[1].closed == 1
    assert [table.reset(5), table.play()] == [[5, 0, 0], [spare_seed(5), 0, 0]]


@pytest.mark.parametrize(
    ("num_steps_before", "action", "error", "text"),
    [
        (0, 666, RuntimeError, "lost its balance"),
        (1, 667, SpaceViolation, "expected a finite reward; got inf"),  # at the end
    ],
)
def test_a_step_that_fails_costs_the_env_that_took_it_alone(
    table: Bench, num_steps_before: int, action: int, error: type[Exception], text: str
) -> None:
    table.reset()
    for _ in range(num_steps_before):
        table.row.step(1)
    with pytest.raises(error, match=text):
        table.row.step(action)
    table.row.rebuild()
    assert [env.closed for env in table.envs] == [1, 0, 0]
    assert table.reset() == [env_seed(0, 3, 1), 0, 0]
    assert table.play() == [spare_seed(SEED), 0, 0]


# The end.


@pytest.mark.parametrize("is_away", [False, True])
def test_both_are_closed_but_none_that_is_away(table: Bench, is_away: bool) -> None:
    spare = table.envs[1]
    if is_away:
        spare.gates[0] = threading.Event()
    table.reset()
    assert spare.entered.wait(WAIT)
    if not is_away:
        table.threads.shutdown()
    table.row.close()
    assert [env.closed for env in table.envs] == [1, 0 if is_away else 1]
