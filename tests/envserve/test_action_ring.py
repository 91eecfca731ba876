"""What the ring has kept leads another env to where the first one is."""

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
from envserve.worker.replay_worker import play
from envserve.worker.spare_row import ResetThreads, SpareRow

Array = np.ndarray[Any, Any]
ROOT_SEED = 3


class WalkEnv(gymnasium.Env[Array, Any]):
    """Wanders at random, for a random number of steps; with own luck if asked to."""

    def __init__(self, has_own_luck: bool = False, longest: int = 12) -> None:
        self.observation_space = spaces.Box(-1e9, 1e9, (2,), np.float64)
        self.action_space = spaces.Tuple(
            [spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(5)]
        )
        self.bias = 0.0
        self._has_own_luck = has_own_luck
        self._longest = longest

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        if self._has_own_luck:
            if seed is not None:
                self._luck = np.random.Generator(np.random.MT19937(seed))
        else:
            super().reset(seed=seed)
            self._luck = self.np_random
        self._place = self._luck.normal(size=2) + (options or {}).get("start", 0.0)
        self._left = int(self._luck.integers(1, self._longest, dtype=np.int32))
        return self._place.copy(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        push, kind = action
        self._place += self._luck.normal(size=2) + push[:2] * float(kind) + self.bias
        self._left -= 1
        return self._place.copy(), 0.0, self._left <= 0, False, {}


@pytest.fixture(autouse=True)
def walk_env() -> Iterator[None]:
    gymnasium.register("Walk-v0", lambda **kwargs: WalkEnv(**kwargs))
    yield
    del gymnasium.registry["Walk-v0"]


class Walk:
    """A block of two rows from row 1 on, of which row 2 is looked at."""

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
        heartbeat = private_heartbeat()
        record = self.ring.row(2)
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
            self.ring.note_step(self.rows.action, 1, 3)
            _, terminated, truncated, _ = self.env.step(action)
            if (terminated or truncated) and self.autoreset == "disabled":
                self.env.reset(None)

    @property
    def place(self) -> list[float]:
        seen: list[float] = self.rows.observation[0][2].tolist()
        return seen

    def played(self, **options: Any) -> ActionHistory:
        # As another process would see it.
        played = ActionRing(self.spec, 3, bytearray(self.memory)).read(2, **options)
        assert played is not None
        return played

    def replay(self, played: ActionHistory | None = None) -> list[float]:
        """Plays what a file says in a new env; returns where that is then."""
        repro = Repro(
            env_name="Walk-v0",
            env_kwargs=self.kwargs,
            import_modules=(),
            autoreset=self.autoreset,
            root_seed=ROOT_SEED,
            seeded=True,
            env_index=7,
            timeout_seconds=1.0,
            played=played or self.played(),
            end=End(status=Status.ENV_ERROR, text=""),
        )
        repro = decode_repro(encode_repro(repro))
        request = self.request(first_env_index=7)
        env = EnvRow(request, 0, repro.played.incarnation)
        rows = play(repro, env, env.build(), lambda _: None)
        seen: list[float] = rows.observation[0][0].tolist()
        return seen

    def close(self) -> None:
        self.env.close()
        if self.threads is not None:
            self.threads.shutdown()


Make = Callable[..., Walk]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    walks: list[Walk] = []

    def make_walk(num_steps: int = 2048, **options: Any) -> Walk:
        monkeypatch.setattr("envserve.crashes.action_ring._MAX_STEPS", num_steps)
        walks.append(Walk(**options))
        return walks[-1]

    yield make_walk
    for walk in walks:
        walk.close()


@pytest.mark.parametrize("num_steps", [2048, 64])
@pytest.mark.parametrize("has_spare", [False, True])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_replay_ends_where_the_env_is_at_every_step(
    make: Make, autoreset: str, has_spare: bool, num_steps: int
) -> None:
    walk = make(num_steps, autoreset=autoreset, has_spare=has_spare)
    walk.env.reset(None)
    for _ in range(200):
        assert walk.replay() == walk.place
        walk.step()
    played = walk.played()
    assert played.num_missing == 0
    assert played.incarnation == 4
    is_short = num_steps == 64 or has_spare or autoreset == "disabled"
    assert (played.seed is None) is is_short
    assert (played.generator is None) is not is_short


def test_seed_and_resets_of_the_caller_are_followed(make: Make) -> None:
    walk = make()
    walk.env.reset(None)
    walk.step(3)
    walk.env.reset(99)
    assert walk.played().seed == 99
    walk.step(2)
    assert walk.replay() == walk.place
    walk.env.reset(None)  # which no replay of the actions alone would know of
    played = walk.played()
    assert played.seed is None
    assert len(played.actions[0]) == played.episode_step == 0
    walk.step(30)
    assert walk.replay() == walk.place


@pytest.mark.parametrize("has_spare", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
def test_options_of_the_reset_to_begin_with_are_followed(
    make: Make, seed: int | None, has_spare: bool
) -> None:
    walk = make(has_spare=has_spare, longest=1000)
    walk.env.reset(None)
    walk.step(2)
    options, others = (codec.encode({"start": start}) for start in (7.0, 8.0))
    walk.env.reset(seed, options)
    walk.step(3)
    played = walk.played(options=options)
    assert (played.options, played.misses_options) == (options, False)
    assert walk.replay(played) == walk.place
    assert walk.played(options=others).misses_options
    walk.env.reset(None, options)
    for _ in range(2):  # also where there is no step in between
        walk.env.reset(None)
        played = walk.played(options=options)
        assert (played.options, played.misses_options) == (b"", True)
        assert walk.replay(played) == walk.place


def test_an_env_that_was_never_seeded_is_followed(make: Make) -> None:
    walk = make()
    walk.env.forget_seed()
    walk.env.reset(None)
    for _ in range(30):
        walk.step()
        assert walk.replay() == walk.place


def test_own_luck_is_followed_from_the_seed_while_all_is_kept(make: Make) -> None:
    walk = make(64, has_own_luck=True)
    walk.env.reset(None)
    walk.step(64)
    assert walk.replay() == walk.place
    walk.step(1)
    played = walk.played()
    assert played.seed is None
    assert played.generator is None
    assert len(played.actions[0]) == played.episode_step


def test_actions_that_are_no_longer_kept_are_counted(make: Make) -> None:
    walk = make(8, longest=1000)
    walk.env.reset(None)
    walk.step(7)
    assert walk.played().num_missing == 0
    while walk.played().episode_step < 20:
        walk.step()
    played = walk.played()
    assert len(played.actions[0]) == len(played.actions[1]) == 8
    assert played.num_missing >= 12
    assert played.actions[1][-1] == walk.rows.action[1][2]


def test_actions_that_are_very_long_are_not_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserve.crashes.action_ring._MAX_ACTION_BYTES", 19)
    walk = make()
    walk.env.reset(None)
    assert walk.played().seed is not None
    walk.step(1)
    played = walk.played()
    assert [len(array) for array in played.actions] == [0, 0]
    assert played.num_missing == 1


def test_kept_memory_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envserve.crashes.action_ring._MAX_RING_BYTES", 10 * 3 * 20)
    walk = make()
    assert walk.ring.num_steps == 10
    assert len(walk.memory) < 3 * 3 * 128 + 64 + 10 * 3 * 20 + 2 * 64


def test_env_that_has_failed_is_told_from_the_one_that_replaces_it(make: Make) -> None:
    walk = make(64)
    walk.env.reset(None)
    walk.step(30)
    before = walk.place
    walk.env.record.keep_failed()
    walk.env.rebuild()
    walk.env.reset(None)
    assert walk.played().incarnation == 5
    assert walk.played().episode_step == 0
    failed = walk.played(has_failed=True)
    assert failed.incarnation == 4
    assert walk.replay(failed) == before


@pytest.mark.parametrize("num_steps", [8, 2048])
def test_a_last_observation_that_is_not_finite_fails_before_the_next_episode(
    make: Make, num_steps: int
) -> None:
    walk = make(num_steps, longest=4)
    walk.env.reset(None)
    walk.step(20)
    while walk.played().episode_step:  # up to an end, where a new episode has begun
        walk.step()
    num_played = walk.ring.counts[2]
    walk.env.call("set", "bias", [np.nan])
    with pytest.raises(SpaceViolation, match="expected observation to be finite"):
        walk.step(4)
    walk.env.record.keep_failed()
    failed = walk.played(has_failed=True)
    assert failed.episode_step == walk.ring.counts[2] - num_played > 0
    assert len(failed.actions[0]) >= failed.episode_step


def test_touched_env_is_marked(make: Make) -> None:
    walk = make()
    walk.env.reset(None)
    assert not walk.played().is_touched
    walk.env.record.touch()
    assert walk.played().is_touched
    walk.env.reset(5)
    assert walk.played().is_touched


def test_nothing_is_read_of_a_row_without_a_reset_or_with_rubbish(make: Make) -> None:
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
