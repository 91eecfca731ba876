"""Vector envs as blocks: data, autoreset modes and faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from envserve.client import BatchEnv, Status
from envserve.errors import CallError, EnvError, EnvStartError, UnknownEnv
from envserve.lane import Reset
from envserve.pool.replay import load_repro, replay
from envserve.settings import EnvRequest, HostSettings, Infos, PoolSettings
from tests.oracle.vector_envs import MODES, WalksEnv

from .conftest import MakeBatch
from .pool_driver import PoolMaker, assert_lost, reset, step

NUM_ENVS = 5


def play(batch: BatchEnv, num_steps: int = 40) -> list[Any]:
    """Return the results of random actions; without autoreset, reset ended rows."""
    draws = np.random.default_rng(7)
    seen: list[Any] = [batch.reset()]
    for _ in range(num_steps):
        result = batch.step(draws.integers(0, 4, batch.num_envs))
        ended = np.flatnonzero(result.terminated | result.truncated)
        seen.append((result._replace(infos={}), {**result.infos}))
        if batch.autoreset == "disabled" and ended.size:
            seen.append(batch.reset(ended))
    return seen


#: Supported pairs of the vector env's autoreset mode and the requested mode.
POSSIBLE = [*((mode, mode) for mode in MODES), ("disabled", "same_step")]


@pytest.mark.parametrize(("own", "asked"), POSSIBLE)
def test_a_vector_block_returns_the_same_data_as_single_envs(
    make_batch: MakeBatch, own: str, asked: str
) -> None:
    infos = "episode_end" if own == asked == "disabled" else "all"
    options: dict[str, Any] = {
        "autoreset": asked,
        "infos": infos,
        "seed": 3,
        "num_splits": 2,
    }
    alone = make_batch(MODES[own], NUM_ENVS, 1, **options)
    together = make_batch(MODES[own], NUM_ENVS, 1, vectorized=True, **options)
    for single, vector in zip(play(alone), play(together), strict=True):
        np.testing.assert_equal(vector, single)


def test_rows_do_not_depend_on_the_size_of_blocks(make_batch: MakeBatch) -> None:
    batches = [
        make_batch(MODES["same_step"], 6, workers, vectorized=True, seed=3)
        for workers in (1, 3)
    ]
    one, three = map(play, batches)
    np.testing.assert_equal(three, one)


@pytest.mark.parametrize(
    ("own", "asked"),
    [(own, asked) for own in MODES for asked in MODES if (own, asked) not in POSSIBLE],
)
def test_an_unsupported_autoreset_mode_is_rejected_at_start(
    make_batch: MakeBatch, own: str, asked: str
) -> None:
    options = rf"autoreset=.*{own}.* \(autoreset_mode of make_vec\)"
    text = rf"expected {options}, .* resets in mode {own.upper()}; got {asked}"
    with pytest.raises(EnvStartError, match=text):
        make_batch(MODES[own], 2, 1, vectorized=True, autoreset=asked)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"wrappers": [{"name": "ActionRepeat", "amount": 2}]},
            EnvStartError,
            "do not support wrappers; remove ActionRepeat",
        ),
        ({"spare_envs": True}, EnvStartError, "do not support spare_envs"),
        (
            {"env_name": "envserve/Ledger-v0"},
            UnknownEnv,
            "vector_entry_point; .* register it",
        ),
        ({"env_name": "Nothing-v0"}, UnknownEnv, "Nothing-v0"),
        (
            {"env_kwargs": {"fault": "uneven"}, "num_envs": 5, "num_splits": 2},
            EnvStartError,
            r"Env \d: its spaces differ from the spaces of env \d",
        ),
    ],
)
def test_unsupported_settings_of_a_vector_env_are_rejected_at_start(
    make_batch: MakeBatch, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make_batch(**{"env_name": MODES["same_step"], **options}, vectorized=True)


def faulty(make_batch: MakeBatch, fault: str, **options: Any) -> BatchEnv:
    kwargs = {"fault": fault}
    batch = make_batch(
        *(MODES["next_step"], 4, 2),
        **{
            "autoreset": "next_step",
            "vectorized": True,
            "env_kwargs": kwargs,
            **options,
        },
    )
    batch.reset()
    return batch


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("raise", Status.ENV_ERROR),
        ("exit", Status.WORKER_DIED),
        ("hang", Status.TIMEOUT),
    ],
)
def test_a_fault_ends_the_episodes_of_all_rows_of_its_block(
    make_batch: MakeBatch, fault: str, status: Status
) -> None:
    more = {"step_timeout": 1.0} if fault == "hang" else {}
    batch = faulty(make_batch, fault, **more)
    last = batch.step([0, 1, 0, 1])
    result = batch.step([3, 0, 0, 0])
    assert result.status.tolist() == [status] * 2 + [Status.OK] * 2
    assert result.truncated.tolist()[:2] == [True] * 2
    np.testing.assert_equal(
        result.final_observation["x"][:2], last.observation["x"][:2]
    )
    assert all("fault" in result.infos[row] for row in (0, 1))
    assert batch.step([0] * 4).valid.all()


@pytest.mark.parametrize("fault", ["raise", "exit"])
def test_rows_that_are_not_reset_after_a_fault_begin_in_the_next_step(
    make_batch: MakeBatch, fault: str
) -> None:
    options = {"env_kwargs": {"fault": fault, "kind": "masked"}, "infos": "all"}
    batch = faulty(make_batch, fault, seed=3, **options)
    last = batch.step([1] * 4).observation["x"]
    batch.step([3, 0, 0, 0])
    first = batch.reset([0])["x"][0]
    np.testing.assert_equal(batch.last_observation()["x"][:2], [first, last[1]])
    result = batch.step([1] * 4)
    assert result.valid.all()
    assert result.reward.tolist() == [1, 0, 1, 1]
    assert result.observation["t"].tolist() == [1, 0, 3, 3]
    assert result.infos[1] == {"start": result.observation["x"][1, 0]}
    result = batch.step([1] * 4)
    assert result.observation["t"].tolist() == [2, 1, 4, 4]
    assert "luck" in result.infos[1]
    batch.step([3, 0, 0, 0])
    batch.reset([0], [4])  # this episode ends in its first step
    result = batch.step([1] * 4)
    assert result.terminated.tolist()[:2] == [True, False]
    for leaf, final in zip(
        result.observation.values(), result.final_observation.values(), strict=True
    ):
        np.testing.assert_equal(final[0], leaf[0])


@pytest.mark.parametrize("kind", ["masked", "masked_without_seeds"])
def test_the_first_row_may_begin_in_the_next_step_after_a_fault(
    make_batch: MakeBatch, kind: str
) -> None:
    options = {"env_kwargs": {"fault": "raise", "kind": kind}, "infos": "all"}
    batch = faulty(make_batch, "raise", seed=3, **options)
    for _ in range(3):
        batch.step([3, 0, 0, 0])
        batch.reset([1])
        for _ in range(2):
            result = batch.step([1] * 4)
            assert result.valid.all()
            assert [*result.infos] == [0, 1, 2, 3]


def test_a_fault_is_logged_once_and_its_file_cannot_be_replayed(
    make_pool: PoolMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"autoreset": "next_step", "vectorized": True}
    options |= {"env_kwargs": {"fault": "raise"}, "crash_dir": str(tmp_path)}
    pool = make_pool.and_reset(MODES["next_step"], 3, 1, **options)
    (outcome,) = step(pool, 3)
    first, *others = [fault.text for fault in outcome.faults]
    assert "Traceback" in first
    assert others == ["RuntimeError: the simulator lost its balance"] * 2
    (record,) = caplog.records
    assert "The vector env of envs 0 to 2 (worker 0" in record.getMessage()
    (path,) = tmp_path.glob("*.repro")
    assert f"the actions of its first row are in {path}" in record.getMessage()
    assert "envserve replay" not in record.getMessage()
    repro = load_repro(path)
    assert [len(array) for array in repro.played.actions] == [1]
    ending = replay(repro, make_pool.launcher)
    assert not ending.is_reproduced
    assert ending.text.startswith(
        "could not be replayed: this env was a row of a vector env"
    )


def test_a_host_may_choose_vector_envs_by_itself() -> None:
    host = HostSettings(vector_envs=("A-v0",))
    settings = [
        PoolSettings.of(EnvRequest(env_name=name, num_envs=1, seed=0), host)
        for name in ("A-v0", "B-v0")
    ]
    assert [each.vectorized for each in settings] == [True, False]


def test_a_value_outside_the_spaces_raises(make_batch: MakeBatch) -> None:
    for fault, text in {
        "nan": "expected observation 'x' to be finite; got nan",
        "wrong_shape": r"expected observation 'x' float32\[2, 2\]; got float32\[1, 2\]",
        "wrong_keys": "expected a dict with",
        "no_reward": r"expected reward to be \[2\] numbers; got object\[2\]",
        "no_infos": "expected infos to be a dict of arrays; got NoneType",
        "list_of_infos": "expected infos to be a dict of arrays; got list",
    }.items():
        with faulty(make_batch, fault) as batch:
            with pytest.raises(EnvError, match=text):
                batch.step([3, 0, 0, 0])
            batch.reset()
            assert batch.step([0] * 4).valid.all()


def test_nan_is_masked_or_passed_on_if_configured(make_batch: MakeBatch) -> None:
    masked = faulty(make_batch, "nan", nonfinite="mask").step([3, 0, 0, 0])
    assert masked.valid.tolist() == [False, False, True, True]
    passed = faulty(make_batch, "nan", nonfinite="pass").step([3, 0, 0, 0])
    assert passed.valid.all()
    assert np.isnan(passed.observation["x"][:2]).all()


def test_attributes_belong_to_the_vector_env(make_batch: MakeBatch) -> None:
    batch = faulty(make_batch, "raise")
    assert batch.call(3, "render_mode") is None
    if batch.lanes[0].name == "local":
        batch.set_attr("level", [2, 2, 4, 4])
        assert batch.get_attr("level") == [2, 2, 4, 4]
        with pytest.raises(CallError, match="the same value for all rows of a"):
            batch.set_attr("level", [1, 2, 4, 4])
        assert batch.call(0, "double", 4) == 8
        assert not batch.step([3, 0, 0, 0]).valid.all()
        assert batch.get_attr("level") == [2, 2, 4, 4]


def test_last_observations_may_be_in_a_list(make_batch: MakeBatch) -> None:
    options: dict[str, Any] = {"vectorized": True, "seed": 3}
    name, in_list = MODES["same_step"], {"fault": "final_obs_in_list"}
    expected = play(make_batch(name, 4, 1, **options))
    seen = play(make_batch(name, 4, 1, **options, env_kwargs=in_list))
    np.testing.assert_equal(seen, expected)


def test_an_ended_episode_without_a_last_observation_raises(
    make_batch: MakeBatch,
) -> None:
    arguments = {"fault": "final_obs_none"}
    name = MODES["same_step"]
    batch = make_batch(name, 4, 1, vectorized=True, seed=3, env_kwargs=arguments)
    with pytest.raises(EnvError, match=r"expected infos\['final_obs'\] with the last"):
        play(batch)


class EndsOnDemand(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Action 1 ends the episode of its row; the arguments are the infos."""

    single_observation_space = gymnasium.spaces.Box(0, 255, (2,), np.uint8)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, num_envs: int, **infos: Any) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs, self._infos = num_envs, infos

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((self.num_envs, 2), np.uint8), {}

    def step(self, actions: Any) -> Any:
        ended = np.asarray(actions) == 1
        return self.reset()[0], 1.0 * ended, ended, ended & False, self._infos


def ending(infos: Infos = "all", **arguments: Any) -> BatchEnv:
    make: Any = EndsOnDemand
    spec = EnvSpec("Ends-v0", vector_entry_point=make)
    batch = BatchEnv.local(spec, 2, 1, env_kwargs=arguments, infos=infos)
    batch.reset()
    return batch


@pytest.mark.parametrize("finals", [[[1, 2], [3, 4]], [[1, 2], None]])
def test_last_observations_are_cast_like_others(finals: Any) -> None:
    with ending(final_obs=finals) as batch:
        assert batch.step([1, 0]).final_observation.tolist() == [[1, 2], [0, 0]]


@pytest.mark.parametrize("final", [[1], [[1], 2], "a", [1, 300], [1.5, 2.5]])
def test_last_observations_outside_the_space_raise(final: Any) -> None:
    with (
        ending(final_obs=[final, None]) as batch,
        pytest.raises(EnvError, match=r"expected observation uint8\[1, 2\]"),
    ):
        batch.step([1, 0])


@pytest.mark.parametrize("final_info", [None, [{}, {}]])
def test_final_infos_are_checked_only_if_they_are_read(final_info: Any) -> None:
    finals = {"final_obs": [[1, 2], None], "final_info": final_info}
    with ending("none", **finals) as batch:
        assert batch.step([1, 0]).valid.all()
    with ending(**finals) as batch:
        assert batch.step([0, 0]).valid.all()
        text = r"infos\['final_info'\] to be a dict of arrays; got (NoneType|list)"
        with pytest.raises(EnvError, match=text):
            batch.step([1, 0])


class KeywordWalks(WalksEnv):
    """Declares no arguments of `reset`, but passes them on."""

    def reset(self, **arguments: Any) -> Any:
        return super().reset(**arguments)


def test_reset_of_a_vector_env_may_take_any_keywords() -> None:
    make: Any = KeywordWalks
    spec = EnvSpec("Keyword-v0", vector_entry_point=make)
    arguments = {"mode": "SAME_STEP"}
    with BatchEnv.local(spec, 3, 1, env_kwargs=arguments) as batch:
        first = batch.reset(seeds=[5, 6, 7])["x"]
    alone = WalksEnv(3, "SAME_STEP").reset(seed=5)[0]["x"]
    np.testing.assert_equal(first, alone)


def test_some_rows_of_a_block_are_reset_by_a_mask(make_batch: MakeBatch) -> None:
    batch = make_batch(MODES["disabled"], 4, 1, vectorized=True, autoreset="disabled")
    batch.reset()
    before = batch.step([0] * 4).observation["x"]
    after = batch.reset([1, 2], seeds=[5, 6])["x"]
    both = batch.reset([1, 2], seeds=[5, 6])["x"]
    np.testing.assert_equal(after, both)
    np.testing.assert_equal(batch.reset(seeds=[5, 6, 5, 6])["x"][:2], after)
    assert not np.isin(after, before).any()


def test_without_a_mask_a_partial_reset_is_rejected(make_batch: MakeBatch) -> None:
    batch = faulty(make_batch, "")
    text = "reset failed: .*all 2 rows of a block.*does not support reset_mask"
    with pytest.raises(EnvError, match=text):
        batch.reset([1])
    batch.reset([0, 1])


def test_a_failed_reset_of_some_rows_costs_all_rows_of_a_block_their_episode(
    make_pool: PoolMaker,
) -> None:
    pool = make_pool.and_reset(
        MODES["next_step"], 3, 1, vectorized=True, autoreset="next_step"
    )
    step(pool, 0)
    (failed,) = reset(pool, Reset(0, (1,)))
    assert "does not support reset_mask" in str(failed.error)
    (outcome,) = step(pool, 0)
    assert_lost(pool, outcome, "a reset of some rows failed")
    assert pool.rows.final_observation[0].tolist() == [1, 1, 1]
    for _ in range(2):
        assert not step(pool, 0)[0].faults
    assert pool.rows.observation[0].tolist() == [1, 1, 1]


def test_resets_accept_options_and_missing_seeds(make_batch: MakeBatch) -> None:
    batch = faulty(make_batch, "", seeded=False, infos="all")
    first = batch.reset(options={"x": 3.0})["x"]
    np.testing.assert_equal(first, np.full((4, 2), 3.0, np.float32))
    assert batch.reset_infos[2] == {"start": 3.0}
    drawn = [batch.reset(seeds=[5, None, 5, None])["x"] for _ in range(2)]
    np.testing.assert_equal(*(each[[0, 2]] for each in drawn))
    assert not np.isin(*(each[[1, 3]] for each in drawn)).any()
    with pytest.raises(EnvError, match=r"reset failed: .*no level"):
        batch.reset(options={"x": "no level"})
    batch.reset()
    assert batch.step([0] * 4).valid.all()


BATCHED = """
import gymnasium, numpy as np
from gymnasium.vector import AutoresetMode
from tests.oracle.probe_envs import NativeMethod

class Device:
    \"\"\"An array on a device, such as one of JAX, which NumPy can read.\"\"\"
    def __init__(self, array): self.array, self.shape = array, array.shape
    def __array__(self, dtype=None, copy=None): return self.array
    def __getitem__(self, index): raise TypeError("slow")

class Counts(gymnasium.vector.VectorEnv):
    \"\"\"Counts its steps up to 3, and resets ended rows, as simulators do.\"\"\"
    single_observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, num_envs, mode=None, has_final=False):
        self.num_envs, self.has_final = num_envs, has_final
        if mode: self.metadata = {"autoreset_mode": AutoresetMode(mode)}

    def reset(self, *, seed=None, options=None):
        self.t = np.zeros((self.num_envs, 1), np.float32)
        return self.t.copy(), {}

    def step(self, actions):
        self.t += 1
        ended, final = self.t[:, 0] == 3, self.t.copy()
        self.t[ended] = 0
        infos = {"count": Device(10 * final[:, 0])}
        infos |= {7: np.arange(self.num_envs), "_7": np.arange(self.num_envs) > 0}
        if self.has_final: infos["final_obs"] = final
        return self.t.copy(), np.ones(self.num_envs), ended, ended & False, infos

class Adding(Counts):
    def __init__(self, num_envs, start):
        super().__init__(num_envs, "Disabled")
        start += 1
        self.start = start

class SilentError(ValueError):
    def __str__(self): raise RuntimeError("the server is gone")

class Silent(Counts):
    def step(self, actions): raise SilentError

class Bare(Counts):
    def reset(self): return super().reset()

class Native(Counts):
    \"\"\"Has a `reset` without a signature, as that of native code.\"\"\"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reset = NativeMethod(self.reset)

class Clearing(Counts):
    \"\"\"Clears the mask that it gets.\"\"\"
    def reset(self, *, seed=None, options=None):
        if not options: return super().reset()
        options["reset_mask"][:] = False
        return self.t + 5, {}

class Masked(Counts):
    \"\"\"Also resets the rows in a mask.\"\"\"
    def __init__(self, num_envs):
        super().__init__(num_envs, "SameStep", has_final=True)
        self.metadata["reset_mask"] = True

    def reset(self, *, seed=None, options=None):
        if not options: return super().reset()
        self.t[options["reset_mask"]] = 0
        return self.t.copy(), {}

class Winning(Counts):
    \"\"\"Reports booleans of both types, which Gymnasium batches.\"\"\"
    def step(self, actions):
        infos = self._add_info({}, {"own": True, "numpy": np.True_}, 1)
        return *super().step(actions)[:4], infos

class Odd(Counts):
    def reset(self, *, seed=None, options=None):
        return super().reset()[:2 - self.has_final]

    def step(self, actions): return super().step(actions)[:4]

gymnasium.register("Counts-v0", None, vector_entry_point="counts_file:Counts")
gymnasium.register("Adding-v0", None, vector_entry_point="counts_file:Adding")
gymnasium.register("Silent-v0", None, vector_entry_point="counts_file:Silent")
gymnasium.register("Bare-v0", None, vector_entry_point="counts_file:Bare")
gymnasium.register("Native-v0", None, vector_entry_point="counts_file:Native")
gymnasium.register("Clearing-v0", None, vector_entry_point="counts_file:Clearing")
gymnasium.register("Masked-v0", None, vector_entry_point="counts_file:Masked")
gymnasium.register("Winning-v0", None, vector_entry_point="counts_file:Winning")
gymnasium.register("Odd-v0", None, vector_entry_point="counts_file:Odd")
"""


@pytest.fixture
def batched(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "counts_file.py").write_text(BATCHED)
    modules = [str(tmp_path / "counts_file.py")]
    return {"vectorized": True, "import_modules": modules, "infos": "all"}


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("Counts-v0", {}, r"metadata\['autoreset_mode'\].*; got None; see 'Serve"),
        ("Bare-v0", {"mode": "SameStep"}, r"expected reset\(\*, seed=None, options"),
    ],
)
def test_a_simulator_that_cannot_be_used_is_rejected_with_a_sentence(
    batched: dict[str, Any], name: str, kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(EnvStartError, match=text) as caught:
        BatchEnv.local(name, 4, 2, env_kwargs=kwargs, **batched)
    assert "Traceback" not in str(caught.value)


def test_vector_envs_that_change_their_arguments_do_not_affect_each_other(
    batched: dict[str, Any],
) -> None:
    kwargs = {"start": np.zeros(1)}
    with BatchEnv.local(
        "Adding-v0", 4, 1, num_splits=2, env_kwargs=kwargs, **batched
    ) as batch:
        assert [start.item() for start in batch.get_attr("start")] == [1.0] * 4


def test_a_vector_env_may_change_its_mask(batched: dict[str, Any]) -> None:
    kwargs = {"mode": "Disabled"}
    with BatchEnv.local("Clearing-v0", 2, 1, env_kwargs=kwargs, **batched) as batch:
        batch.reset()
        assert batch.reset([1]).tolist() == [[5.0]]


def test_without_autoreset_the_last_observation_is_not_one_of_the_next_episode(
    batched: dict[str, Any],
) -> None:
    options = {"autoreset": "disabled", **batched}
    with BatchEnv.local("Masked-v0", 2, 1, **options) as batch:
        batch.reset()
        batch.step([0, 0])
        batch.reset([1])
        batch.step([0, 0])
        result = batch.step([0, 0])
        assert result.terminated.tolist() == [True, False]
        assert result.observation.tolist() == [[3.0], [2.0]]
        assert result.final_observation.tolist() == [[3.0], [0.0]]
        assert [*result.infos] == [1]
        assert batch.reset([0]).tolist() == [[0.0]]
        assert batch.step([0, 0]).observation.tolist() == [[1.0], [3.0]]


def test_the_error_about_a_wrong_number_of_results_states_the_expected_ones(
    batched: dict[str, Any],
) -> None:
    kwargs: dict[str, Any] = {"mode": "Disabled", "has_final": True}
    options = {"autoreset": "disabled", **batched}
    with (
        BatchEnv.local("Odd-v0", 4, 2, env_kwargs=kwargs, **options) as batch,
        pytest.raises(EnvStartError, match=r"expected reset\(\) to return an obs"),
    ):
        batch.reset()
    kwargs["has_final"] = False
    with BatchEnv.local("Odd-v0", 4, 2, env_kwargs=kwargs, **options) as batch:
        batch.reset()
        with pytest.raises(EnvError, match=r"expected step\(\) to .*; got 4 values"):
            batch.step([0] * 4)


def test_an_exception_without_a_text_does_not_end_the_worker(
    batched: dict[str, Any],
) -> None:
    kwargs = {"mode": "SameStep"}
    with BatchEnv.local("Silent-v0", 4, 2, env_kwargs=kwargs, **batched) as batch:
        batch.reset()
        step = batch.step([0] * 4)
    assert step.status.tolist() == [Status.ENV_ERROR] * 4
    cause = "counts_file.SilentError: <exception str() failed>"
    assert cause in step.infos[0]["fault"]["text"]


def test_missing_final_observations_are_an_error_and_not_a_lost_episode(
    batched: dict[str, Any],
) -> None:
    kwargs = {"mode": "SameStep"}
    with BatchEnv.local("Counts-v0", 4, 2, env_kwargs=kwargs, **batched) as batch:
        batch.reset()
        batch.step([0] * 4)
        batch.step([0] * 4)
        with pytest.raises(EnvError, match=r"expected infos\['final_obs'\] with the"):
            batch.step([0] * 4)


@pytest.mark.parametrize("name", ["Counts-v0", "Native-v0"])
def test_arrays_that_are_not_numpys_are_split_into_rows(
    batched: dict[str, Any], name: str
) -> None:
    kwargs = {"mode": "SameStep", "has_final": True}
    with BatchEnv.local(name, 4, 2, env_kwargs=kwargs, **batched) as batch:
        batch.reset()
        results = [batch.step([0] * 4) for _ in range(3)]
        assert [results[1].infos[row]["count"] for row in range(4)] == [20.0] * 4
        assert results[1].infos[2].keys() == {"count"}  # "_7" is a mask
        assert results[1].infos[3] == {"count": 20.0, 7: 1}
        assert results[2].final_observation[:, 0].tolist() == [3.0] * 4
        assert results[2].observation[:, 0].tolist() == [0.0] * 4


def test_booleans_in_infos_keep_their_types(batched: dict[str, Any]) -> None:
    kwargs = {"mode": "Disabled"}
    with BatchEnv.local("Winning-v0", 2, 1, env_kwargs=kwargs, **batched) as batch:
        batch.reset()
        (info,) = batch.step([0] * 2).infos.values()
        assert info == {"own": True, "numpy": True}
        assert [*map(type, info.values())] == [bool, np.bool_]
