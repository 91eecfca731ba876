"""Replaying the recorded actions brings a new env to the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envserve.crashes.action_ring import ActionHistory, ActionRing, ring_nbytes
from envserve.crashes.repro_file import End, Repro, decode_repro, encode_repro
from envserve.settings import Autoreset, EnvRequest
from envserve.slab import Rows, Status, private_heartbeat
from envserve.spaces import codec
from envserve.worker.env_checks import SpaceViolation
from envserve.worker.env_row import EnvRow
from envserve.worker.replay_worker import apply_actions
from envserve.worker.spare_row import ResetThreads, SpareRow

Array = np.ndarray[Any, Any]
ROOT_SEED = 3


class WalkEnv(gymnasium.Env[Array, Any]):
    """A random walk of random length.

    On request, its random numbers come from a generator other than `np_random`.
    """

    def __init__(self, has_other_generator: bool = False, max_steps: int = 12) -> None:
        self.observation_space = spaces.Box(-1e9, 1e9, (2,), np.float64)
        self.action_space = spaces.Tuple(
            [spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(5)]
        )
        self.bias = 0.0
        self._has_other_generator = has_other_generator
        self._max_steps = max_steps

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if self._has_other_generator:
            if seed is not None:
                self._random = np.random.Generator(np.random.MT19937(seed))
        else:
            super().reset(seed=seed)
            self._random = self.np_random
        self._position = self._random.normal(size=2) + (options or {}).get("start", 0.0)
        self._steps_left = int(
            self._random.integers(1, self._max_steps, dtype=np.int32)
        )
        return self._position.copy(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        push, kind = action
        self._position += (
            self._random.normal(size=2) + push[:2] * float(kind) + self.bias
        )
        self._steps_left -= 1
        return self._position.copy(), 0.0, self._steps_left <= 0, False, {}


@pytest.fixture(autouse=True)
def walk_env() -> Iterator[None]:
    gymnasium.register("Walk-v0", lambda **kwargs: WalkEnv(**kwargs))
    yield
    del gymnasium.registry["Walk-v0"]


class RecordedRow:
    """A ring of three rows in two blocks (0 and 1 to 2); only row 2 is stepped."""

    def __init__(
        self, autoreset: Autoreset = "same_step", has_spare: bool = False, **kwargs: Any
    ) -> None:
        self.autoreset = autoreset
        self.kwargs = kwargs
        self.threads = ResetThreads(1) if has_spare else None
        arguments = self.request(first_env_index=5), 2, 4
        self.env: EnvRow | SpareRow = EnvRow(*arguments)
        if self.threads is not None:
            self.env = SpareRow(self.env, EnvRow(*arguments), self.threads)
        self.spec = self.env.build()
        if isinstance(self.env, SpareRow):
            self.env.build_spare()
        self.rows = Rows.allocate(self.spec, 3)
        self.memory = bytearray(ring_nbytes(self.spec, 3))
        self.ring = ActionRing(self.spec, 3, self.memory)
        self.record_step = self.ring.step_recorder(self.rows.action, 1, 3)
        heartbeat = private_heartbeat()
        record = self.ring.row_record(2)
        self.env.attach(self.rows, heartbeat, record)
        self.space = self.spec.action_space
        self.space.seed(1)

    def request(self, first_env_index: int) -> EnvRequest:
        return EnvRequest(
            env_name="Walk-v0",
            env_kwargs=self.kwargs,
            num_envs=3,
            seed=ROOT_SEED,
            first_env_index=first_env_index,
            autoreset=self.autoreset,
        )

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            action = self.space.sample()
            for array, value in zip(self.rows.action, action, strict=True):
                array[2] = value
            self.record_step()
            _, terminated, truncated, _ = self.env.step(action)
            if (terminated or truncated) and self.autoreset == "disabled":
                self.env.reset(None)

    @property
    def position(self) -> list[float]:
        seen: list[float] = self.rows.observation[0][2].tolist()
        return seen

    def history(self, **options: Any) -> ActionHistory:
        # Read a copy of the memory, as another process would.
        history = ActionRing(self.spec, 3, bytearray(self.memory)).read(2, **options)
        assert history is not None
        return history

    def replay(self, history: ActionHistory | None = None) -> list[float]:
        """Replay a history in a new env through a repro file; return its position."""
        repro = Repro(
            env_name="Walk-v0",
            env_kwargs=self.kwargs,
            import_modules=(),
            autoreset=self.autoreset,
            root_seed=ROOT_SEED,
            seeded=True,
            env_index=7,
            timeout_seconds=1.0,
            played=history or self.history(),
            end=End(status=Status.ENV_ERROR, text=""),
        )
        repro = decode_repro(encode_repro(repro))
        request = self.request(first_env_index=7)
        env = EnvRow(request, 0, repro.played.incarnation)
        env.build()
        rows = apply_actions(repro, env, lambda _: None)
        seen: list[float] = rows.observation[0][0].tolist()
        return seen

    def close(self) -> None:
        self.env.close()
        if self.threads is not None:
            self.threads.shutdown()


Make = Callable[..., RecordedRow]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    walks: list[RecordedRow] = []

    def make_walk(num_steps: int = 2048, **options: Any) -> RecordedRow:
        monkeypatch.setattr("envserve.crashes.action_ring._MAX_STEPS", num_steps)
        walks.append(RecordedRow(**options))
        return walks[-1]

    yield make_walk
    for walk in walks:
        walk.close()


@pytest.mark.parametrize("num_steps", [2048, 64])
@pytest.mark.parametrize("has_spare", [False, True])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_a_replay_reaches_the_state_of_the_env_after_every_step(
    make: Make, autoreset: str, has_spare: bool, num_steps: int
) -> None:
    walk = make(num_steps, autoreset=autoreset, has_spare=has_spare)
    walk.env.reset(None)
    for _ in range(200):
        assert walk.replay() == walk.position
        walk.step()
    history = walk.history()
    assert history.num_missing == 0
    assert history.incarnation == 4
    is_short = num_steps == 64 or has_spare or autoreset == "disabled"
    assert (history.seed is None) is is_short
    assert (history.generator is None) is not is_short


def test_seeds_and_resets_of_the_caller_are_replayed(make: Make) -> None:
    walk = make()
    walk.env.reset(None)
    walk.step(3)
    walk.env.reset(99)
    assert walk.history().seed == 99
    walk.step(2)
    assert walk.replay() == walk.position
    walk.env.reset(None)  # replaying the actions does not repeat this reset
    history = walk.history()
    assert history.seed is None
    assert len(history.actions[0]) == history.episode_step == 0
    walk.step(30)
    assert walk.replay() == walk.position


@pytest.mark.parametrize("has_spare", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
def test_options_of_the_first_reset_are_replayed(
    make: Make, seed: int | None, has_spare: bool
) -> None:
    walk = make(has_spare=has_spare, max_steps=1000)
    walk.env.reset(None)
    walk.step(2)
    options, others = (codec.encode({"start": start}) for start in (7.0, 8.0))
    walk.env.reset(seed, options)
    walk.step(3)
    history = walk.history(options=options)
    assert (history.options, history.misses_options) == (options, False)
    assert walk.replay(history) == walk.position
    assert walk.history(options=others).misses_options
    walk.env.reset(None, options)
    for _ in range(2):  # the second time, without a step in between
        walk.env.reset(None)
        history = walk.history(options=options)
        assert (history.options, history.misses_options) == (b"", True)
        assert walk.replay(history) == walk.position


def test_an_env_that_was_never_seeded_can_be_replayed(make: Make) -> None:
    walk = make()
    walk.env.drop_initial_seed()
    walk.env.reset(None)
    for _ in range(30):
        walk.step()
        assert walk.replay() == walk.position


def test_an_env_with_another_generator_is_replayed_from_its_seed(make: Make) -> None:
    walk = make(64, has_other_generator=True)
    walk.env.reset(None)
    walk.step(64)
    assert walk.replay() == walk.position
    walk.step(1)
    history = walk.history()
    assert history.seed is None
    assert history.generator is None
    assert len(history.actions[0]) == history.episode_step


def test_actions_that_are_no_longer_kept_are_counted(make: Make) -> None:
    walk = make(8, max_steps=1000)
    walk.env.reset(None)
    walk.step(7)
    assert walk.history().num_missing == 0
    while walk.history().episode_step < 20:
        walk.step()
    history = walk.history()
    assert len(history.actions[0]) == len(history.actions[1]) == 8
    assert history.num_missing >= 12
    assert history.actions[1][-1] == walk.rows.action[1][2]


def test_very_long_actions_are_not_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserve.crashes.action_ring._MAX_ACTION_BYTES", 19)
    walk = make()
    walk.env.reset(None)
    assert walk.history().seed is not None
    walk.step(1)
    history = walk.history()
    assert [len(array) for array in history.actions] == [0, 0]
    assert history.num_missing == 1


def test_the_size_of_the_ring_is_bounded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserve.crashes.action_ring._MAX_RING_BYTES", 10 * 3 * 20)
    walk = make()
    assert walk.ring.num_steps == 10
    assert len(walk.memory) < 3 * 3 * 128 + 64 + 10 * 3 * 20 + 2 * 64


def test_the_histories_of_a_failed_env_and_its_replacement_are_separate(
    make: Make,
) -> None:
    walk = make(64)
    walk.env.reset(None)
    walk.step(30)
    before = walk.position
    walk.env.record.save_failed_record()
    walk.env.rebuild()
    walk.env.reset(None)
    assert walk.history().incarnation == 5
    assert walk.history().episode_step == 0
    failed = walk.history(has_failed=True)
    assert failed.incarnation == 4
    assert walk.replay(failed) == before


@pytest.mark.parametrize("num_steps", [8, 2048])
def test_a_non_finite_last_observation_fails_before_the_next_episode(
    make: Make, num_steps: int
) -> None:
    walk = make(num_steps, max_steps=4)
    walk.env.reset(None)
    walk.step(20)
    while walk.history().episode_step:  # until a new episode has begun
        walk.step()
    num_played = walk.ring.counts[2]
    walk.env.call("set", "bias", [np.nan])
    with pytest.raises(SpaceViolation, match="expected observation to be finite"):
        walk.step(4)
    walk.env.record.save_failed_record()
    failed = walk.history(has_failed=True)
    assert failed.episode_step == walk.ring.counts[2] - num_played > 0
    assert len(failed.actions[0]) >= failed.episode_step


def test_a_touched_env_is_marked(make: Make) -> None:
    walk = make()
    walk.env.reset(None)
    assert not walk.history().is_touched
    walk.env.record.mark_touched()
    assert walk.history().is_touched
    walk.env.reset(5)
    assert walk.history().is_touched


def test_read_returns_none_before_a_reset_or_from_corrupt_memory(make: Make) -> None:
    walk = make()
    assert walk.ring.read(2) is None
    walk.env.reset(None)
    assert walk.ring.read(1) is None
    assert walk.ring.read(2, has_failed=True) is None
    walk.ring.counts[2] = -5
    assert walk.ring.read(2) is None
    for byte in (0x01, 0xFF):
        walk.memory[:] = bytes([byte]) * len(walk.memory)
        assert walk.ring.read(2) is None
