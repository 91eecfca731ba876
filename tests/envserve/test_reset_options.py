"""Reset seeds, options and infos, on local and remote lanes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from envserve.client import BatchEnv
from envserve.envs.seeding import env_seed
from envserve.errors import CodecError, EnvError, EnvStartError, LocalProtocolError
from envserve.worker.reset_signature import complete_reset_signature

from .conftest import MakeBatch

RESET = "envserve/Reset-v0"


@pytest.fixture
def batch(make_batch: MakeBatch) -> BatchEnv:
    """A batch of three envs in two blocks; each reset info holds the arguments."""
    return make_batch(RESET, 3, 2, seed=1, infos="all")


def reset_info(batch: BatchEnv, what: str) -> dict[int, Any]:
    return {row: info[what] for row, info in batch.reset_infos.items()}


def step(batch: BatchEnv, action: int = 0) -> Any:
    return batch.step(np.full(batch.num_envs, action))


def test_every_env_of_a_reset_gets_its_options(batch: BatchEnv) -> None:
    assert batch.reset_infos == {}
    batch.reset()
    assert reset_info(batch, "options") == {0: None, 1: None, 2: None}
    batch.reset([2, 0], options={"level": 3, "sizes": np.arange(2)})
    assert batch.reset_infos.keys() == {0, 2}
    for options in reset_info(batch, "options").values():
        assert options.pop("sizes").tolist() == [0, 1]
        assert options == {"level": 3}
    batch.reset([1], options={})
    assert reset_info(batch, "options") == {1: {}}


def test_an_autoreset_gets_no_options(batch: BatchEnv) -> None:
    batch.reset(options={"level": 3})
    result = step(batch, action=1)
    infos = [info["reset_info"] for info in result.infos.values()]
    assert infos == [{"seed": None, "options": None}] * 3


def test_each_row_has_a_seed_or_none(batch: BatchEnv) -> None:
    batch.reset(seeds=[None, 5, None])
    assert reset_info(batch, "seed") == {0: None, 1: 5, 2: None}
    batch.reset()
    assert reset_info(batch, "seed") == dict.fromkeys(range(3))


def test_the_first_reset_with_only_none_as_seeds_uses_the_root_seed(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(RESET, 2, 1, seed=1, infos="all")
    batch.reset(seeds=[None, None])
    seeds = {row: env_seed(1, row, 0) for row in range(2)}
    assert reset_info(batch, "seed") == seeds


@pytest.mark.parametrize("spare_envs", [False, True])
@pytest.mark.parametrize("seeded", [False, True])
def test_first_resets_have_seeds_if_the_batch_is_seeded(
    make_batch: MakeBatch, seeded: bool, spare_envs: bool
) -> None:
    options: dict[str, Any] = {"infos": "all", "spare_envs": spare_envs}
    batch = make_batch(RESET, 1, 1, seed=1, seeded=seeded, **options)
    batch.reset()
    assert reset_info(batch, "seed") == {0: env_seed(1, 0, 0) if seeded else None}
    next_seed = step(batch, action=1).infos[0]["reset_info"]["seed"]
    assert (next_seed is not None) is (seeded and spare_envs)


def test_with_a_spare_the_options_apply_to_the_next_episode(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(RESET, 1, 1, infos="all", spare_envs=True)
    for level in range(3):  # each reset discards the prepared episode
        batch.reset(options={"level": level})
        assert reset_info(batch, "options") == {0: {"level": level}}
    batch.reset()
    assert reset_info(batch, "options") == {0: None}


def test_options_that_an_env_rejects_are_an_error_and_cost_nothing_else(
    batch: BatchEnv,
) -> None:
    batch.reset()
    with pytest.raises(EnvError, match=r"Env 0: reset failed, .*no level 13") as at:
        batch.reset([1, 0], options={"level": 13})
    assert at.value.remote_traceback.count("raise ValueError") == 1
    with pytest.raises(LocalProtocolError, match=r"reset\(\) for all envs"):
        step(batch)
    batch.reset(options={"level": 1})
    assert [*reset_info(batch, "options").values()] == [{"level": 1}] * 3
    assert step(batch).valid.all()


def test_options_that_cannot_be_sent_reset_nothing(batch: BatchEnv) -> None:
    batch.reset()
    options: Any
    for options, text in (
        ({"a": 1, "level": object()}, "options: level: .*object; .* in env_kwargs"),
        ({1: 2}, "options: expected a str"),
        ([1], "options: expected a map"),
        ({"image": np.zeros(20_000, np.uint8)}, "options: .* at most 16384 bytes"),
        ({"many": [0] * 2000}, "options: .* at most 1024 values"),
    ):
        step(batch)
        with pytest.raises(CodecError, match=text):
            batch.reset(options=options)
        assert step(batch).valid.all()


@pytest.mark.parametrize(
    ("kind", "seeded", "lacks"),
    [
        ("NeedyReset", True, ()),
        ("NativeReset", True, ()),
        ("SeedReset", True, ("options",)),
        ("BareReset", False, ("seed", "options")),
    ],
)
def test_an_env_gets_the_arguments_that_its_reset_declares(
    make_batch: MakeBatch, kind: str, seeded: bool, lacks: tuple[str, ...]
) -> None:
    name = f"envserve/{kind}-v0"
    wrappers = [{"name": "TimeLimit", "max_episode_steps": 9}]
    batch = make_batch(name, 2, 1, seeded=seeded, infos="all", wrappers=wrappers)
    batch.reset()
    assert (reset_info(batch, "seed")[0] is not None) is seeded
    asked: dict[str, dict[str, Any]]
    asked = {"seed": {"seeds": [5, None]}, "options": {"options": {"level": 1}}}
    for what, more in asked.items():
        if what in lacks:
            with pytest.raises(
                EnvError, match=rf"reset\(\) does not accept {what}; declare"
            ):
                batch.reset(**more)
        else:
            batch.reset(**more)
            assert reset_info(batch, what)[0] is not None
    batch.reset()
    assert step(batch).valid.all()


class SeedOnlyEnv(gymnasium.Env[Any, Any]):
    def reset(self, seed: Any = None) -> Any:  # type: ignore[override]
        return seed, {}


class SeedOnlyDuck:
    """An env that does not derive from `gymnasium.Env`."""

    reset = SeedOnlyEnv.reset

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"expected no attribute {name}")


@pytest.mark.parametrize(
    "reset", [lambda env, seed: env.reset(seed=seed), lambda env, seed: env.reset(seed)]
)
def test_only_the_arguments_that_an_env_declares_are_passed(
    reset: Callable[..., Any],
) -> None:
    class Wrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return reset(self.env, seed)

    env: Any
    for env in (Wrapper(SeedOnlyEnv()), SeedOnlyDuck()):
        complete_reset_signature(env, needs_seed=True)
        assert env.reset(seed=3, options=None) == (3, {})


class BareEnv(gymnasium.Env[Any, Any]):
    def reset(self) -> Any:  # type: ignore[override]
        return self.np_random_seed, {}


class SeedingWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seeds an env whose `reset` accepts no seed."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        gymnasium.Env.reset(self.unwrapped, seed=seed)
        return self.env.reset()


class PassingWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Passes all arguments on."""

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)


def test_a_wrapper_may_seed_an_env_whose_reset_accepts_no_seed() -> None:
    env: Any = SeedingWrapper(BareEnv())
    complete_reset_signature(env, needs_seed=True)
    assert env.reset(seed=3, options=None) == (3, {})
    for passing in (
        gymnasium.Wrapper(BareEnv()),
        TimeLimit(BareEnv(), 9),
        PassingWrapper(BareEnv()),
    ):
        with pytest.raises(EnvStartError, match=r"BareEnv.*does not accept seed"):
            complete_reset_signature(passing, needs_seed=True)


class FailingReset(gymnasium.Env[Any, Any]):
    """Raises in as many resets, of all incarnations, as a file has characters."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if text := self._file.read_text():
            self._file.write_text(text[1:])
            raise RuntimeError("no licence is free")
        return 0, {}


@pytest.mark.parametrize("num_failures", [1, 2, 3])
@pytest.mark.parametrize("options", [None, {}])
def test_empty_options_are_no_reason_to_give_up_a_failed_reset(
    options: dict[str, Any] | None, num_failures: int, tmp_path: Path
) -> None:
    file = tmp_path / "failures"
    file.write_text("")
    arguments = {"file": str(file)}
    with BatchEnv.local(FailingReset, env_kwargs=arguments, seeded=False) as batch:
        batch.reset()
        file.write_text("x" * num_failures)
        assert batch.reset(options=options).tolist() == [0]


def test_an_env_without_seeds_is_rejected_if_seeds_are_required(
    make_batch: MakeBatch,
) -> None:
    with pytest.raises(
        EnvStartError, match=r"does not accept seed, .* use seeded=False"
    ):
        make_batch("envserve/BareReset-v0", 2, 1)
