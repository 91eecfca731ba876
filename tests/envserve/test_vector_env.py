"""`make_vec` returns the same data as `gymnasium.make_vec`, locally and on a server."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
)
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit, TransformObservation
from gymnasium.wrappers.vector import (
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
)

from envserve import make_vec
from envserve.client.vector_env import VectorEnv
from envserve.errors import ActionError, CallError, EnvError, LocalProtocolError
from envserve.pool.pool import Pool
from tests.envserve.conftest import MakeEnvs
from tests.envserve.walk_env import ENV, EPISODE_LENGTH
from tests.oracle.identical import assert_identical
from tests.oracle.random_envs import KINDS, RANDOM_ENV

MODES = [mode.value for mode in AutoresetMode]
#: Number of random sequences for each kind of env, mode and kind of lane: 72 in total.
NUM_SEQUENCES = int(os.environ.get("ENVSERVE_TEST_SEQUENCES", "2"))
pytestmark = pytest.mark.usefixtures("one_launcher")


def test_reset_infos_of_a_server_may_have_any_type(make_envs: MakeEnvs) -> None:
    envs = make_envs("CartPole-v1", 2, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset(seed=1)
    batch = envs._batch
    step = batch.step([0, 0])
    ended = np.array([True, True])
    infos: Any = {0: {"reset_info": 5, "a": 1}, 1: {"reset_info": {"b": 2}}}
    infos_by_key = envs._infos(step._replace(terminated=ended, infos=infos))
    assert infos_by_key["b"].tolist() == [0, 2]
    assert infos_by_key["final_info"]["a"].tolist() == [1, 0]
    infos = {0: {"fault": 7}, 1: {"fault": {"status": "TIMEOUT"}}}
    valid = np.array([True, False])
    infos_by_key = envs._infos(
        step._replace(terminated=ended, infos=infos, valid=valid)
    )
    assert infos_by_key["_fault"].tolist() == [False, True]
    assert infos_by_key["final_info"]["fault"].tolist() == [7, 0]


def assert_equal_rows(ours: Any, theirs: Any) -> None:
    assert data_equivalence(ours, theirs, exact=True), (ours, theirs)


def assert_equal_infos(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare infos to the bit; types too, except inside final observations."""
    ours, theirs = dict(ours), dict(theirs)
    for one, other in zip(
        ours.pop("final_obs", ()), theirs.pop("final_obs", ()), strict=True
    ):
        assert str(flat(one)) == str(flat(other))
    assert_identical(ours, theirs)


def flat(observation: Any) -> list[Any]:
    """Return the numbers of an observation, with the keys of a dict in order."""
    if isinstance(observation, dict):
        observation = [observation[key] for key in sorted(observation)]
    if isinstance(observation, list | tuple):
        return [flat(each) for each in observation]
    return [np.asarray(observation).tolist()]


def assert_equal_resets(ours: Any, theirs: Any) -> None:
    assert_equal_rows(ours[0], theirs[0])
    assert_equal_infos(ours[1], theirs[1])


def assert_equal_runs(
    ours: VectorEnv, theirs: SyncVectorEnv[Any, Any], num_steps: int, seed: int = 5
) -> None:
    """Step both vector envs with the same actions, and compare all results."""
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.observation_space == theirs.observation_space
    assert ours.single_action_space == theirs.single_action_space
    assert ours.action_space == theirs.action_space
    assert ours.metadata == theirs.metadata
    assert_equal_resets(ours.reset(seed=seed), theirs.reset(seed=seed))
    theirs.action_space.seed(1)
    for _ in range(num_steps):
        actions = theirs.action_space.sample()
        *rows, infos = ours.step(actions)
        *expected, expected_infos = theirs.step(actions)
        assert_equal_rows(rows, expected)
        assert_equal_infos(infos, expected_infos)
        ended = rows[2] | rows[3]
        if ended.any() and theirs.autoreset_mode is AutoresetMode.DISABLED:
            options = {"reset_mask": ended}
            assert_equal_resets(
                ours.reset(options=dict(options)), theirs.reset(options=options)
            )


@pytest.mark.parametrize("mode", MODES)
def test_ten_thousand_steps_equal_those_of_gymnasium(
    make_envs: MakeEnvs, mode: str
) -> None:
    ours = make_envs("CartPole-v1", 64, autoreset_mode=mode, seed=0)
    envs = [partial(gymnasium.make, "CartPole-v1")] * 64
    with contextlib.closing(SyncVectorEnv(envs, autoreset_mode=mode)) as theirs:
        assert_equal_runs(ours, theirs, 157)


@pytest.mark.parametrize("mode", MODES)
def test_steps_with_infos_equal_those_of_gymnasium(
    make_envs: MakeEnvs, mode: str
) -> None:
    short = {"name": "TimeLimit", "max_episode_steps": 12}
    ours = make_envs("HalfCheetah-v5", 3, autoreset_mode=mode, seed=0, wrappers=[short])
    envs = [lambda: TimeLimit(gymnasium.make("HalfCheetah-v5"), 12)] * 3
    with contextlib.closing(SyncVectorEnv(envs, autoreset_mode=mode)) as theirs:
        assert_equal_runs(ours, theirs, 30)


@pytest.mark.parametrize(
    ("kind", "mode"),
    # With NextStep, the infos of steps and resets are mixed, so keys may be missing.
    [
        (kind, mode)
        for kind in KINDS
        for mode in MODES
        if mode != "NextStep" or kind in ("sparse", "mixed")
    ],
)
def test_random_sequences_equal_those_of_gymnasium(
    make_envs: MakeEnvs, kind: str, mode: str, random_seed: int
) -> None:
    random = np.random.default_rng(random_seed)
    num_envs = int(random.integers(1, 6))
    options: dict[str, Any] = {"autoreset_mode": mode, "env_kwargs": {"kind": kind}}
    ours = make_envs(RANDOM_ENV, num_envs, **options)
    envs = [partial(gymnasium.make, RANDOM_ENV, kind=kind)] * num_envs
    with contextlib.closing(SyncVectorEnv(envs, autoreset_mode=mode)) as theirs:
        for seed in random.integers(1 << 30, size=NUM_SEQUENCES).tolist():
            assert_equal_runs(ours, theirs, 30, seed)


@pytest.mark.parametrize("space", ["dict", "tuple", "discrete_start"])
def test_observations_are_batched_by_their_space(
    make_envs: MakeEnvs, space: str
) -> None:
    envs = make_envs("envserve/Echo-v0", env_kwargs={"space": space})
    observation, _ = envs.reset()
    assert observation in envs.observation_space
    actions = envs.action_space.sample()
    observation, *_ = envs.step(actions)
    assert observation in envs.observation_space
    assert_equal_rows(observation, actions)


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_row_is_truncated_and_its_info_has_the_reason(
    make_envs: MakeEnvs, mode: str
) -> None:
    envs = make_envs("envserve/Faulty-v0", 4, autoreset_mode=mode)
    envs.reset()
    *_, infos = envs.step([0, 0, 0, 0])
    assert infos == {}
    observation, reward, terminated, truncated, infos = envs.step([0, 0, 1, 0])
    lost = [False, False, True, False]
    assert truncated.tolist() == infos["_fault"].tolist() == lost
    assert infos["fault"]["status"].tolist() == [None, None, "ENV_ERROR", None]
    assert infos["valid"].tolist() == [True, True, False, True]
    assert not terminated.any()
    assert reward.tolist() == [1, 1, 0, 1]
    assert ("final_obs" in infos) == ("final_info" in infos) == (mode == "SameStep")
    if mode == "SameStep":
        assert infos["final_info"] == {}
        assert infos["_final_info"].tolist() == infos["_final_obs"].tolist() == lost
        assert infos["final_obs"][2].tolist() == [1, 1, 1]
    if mode == "Disabled":
        envs.reset(options={"reset_mask": truncated})
    if mode != "SameStep":  # the row shows its last observation
        assert observation[2].tolist() == [1, 1, 1]
    num_resets = int(mode == "NextStep")
    for step in range(1, 4):
        observation, *_, infos = envs.step([0, 0, 0, 0])
        assert infos == {}
        counts = [step + 2, step + 2, step - num_resets, step + 2]
        assert observation[:, 0].tolist() == counts


def test_a_step_waits_for_a_worker_that_died(make_envs: MakeEnvs) -> None:
    envs = make_envs("envserve/Faulty-v0", 4, env_kwargs={"fault": "kill"})
    envs.reset()
    *_, truncated, infos = envs.step([0, 1, 0, 0])
    lost = infos["_fault"]
    assert lost[1]
    assert 0 < lost.sum() < 4
    assert (truncated == lost).all()
    assert (infos["valid"] == ~lost).all()
    assert set(infos["fault"]["status"][lost]) == {"WORKER_DIED"}
    assert envs.step([0, 0, 0, 0])[4] == {}


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("fault", ["raise", "kill", "nan"])
def test_after_a_fault_the_next_step_is_a_reset(
    make_envs: MakeEnvs, fault: str, copy: bool
) -> None:
    options: dict[str, Any] = {"env_kwargs": {"fault": fault}, "copy": copy}
    made = make_envs("envserve/Faulty-v0", 2, nonfinite="mask", **options)
    envs = RecordEpisodeStatistics(made)
    envs.reset()
    for _ in range(3):
        envs.step([0, 0])
        envs.step([0, 0])
        observation, reward, _, truncated, infos = envs.step([0, 1])
        assert truncated[1]
        assert reward[1] == 0
        assert observation[1].tolist() == [2, 2, 2]
        assert infos["episode"]["l"][1] == 3
        observation, reward, _, truncated, _ = envs.step([0, 1])  # it is ignored
        assert not truncated.any()
        assert observation[1].tolist() == [0, 0, 0]
        assert reward[1] == 0


def test_after_a_fault_of_a_vector_env_the_next_step_is_a_reset(
    make_envs: MakeEnvs,
) -> None:
    envs = make_envs("CartPole-v1", 4, vectorized=True)
    envs.reset(seed=1)
    before = envs.step([0] * 4)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observation, _, _, truncated, _ = envs.step([0, 7, 0, 0])
    assert truncated[1]
    assert_equal_rows(observation[truncated], before[truncated])
    observation, reward, _, ended, _ = envs.step([0] * 4)
    assert not ended.any()
    assert reward.tolist() == (~truncated).tolist()
    assert np.abs(observation[truncated]).max() <= 0.05  # as after a reset
    assert envs.step([0] * 4)[1].tolist() == [1.0] * 4


@pytest.mark.parametrize("copy", [True, False])
def test_the_final_observation_of_a_lost_row_is_the_last_one_returned(
    copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shared launcher has not imported the file of the env.
    monkeypatch.setattr("envserve.client.factory.Pool", Pool)
    options: dict[str, Any] = {"autoreset_mode": "SameStep", "copy": copy}
    with contextlib.closing(make_vec(ENV, 2, num_workers=1, **options)) as envs:
        envs.reset()
        for time in range(1, EPISODE_LENGTH):
            seen = envs.step(np.zeros(2, int))[0]
            assert seen.tolist() == [[100 + time]] * 2
        # The other row's episode ends in the step in which the worker dies.
        observation, _, _, truncated, infos = envs.step(np.array([0, 1]))
        assert truncated.all()
        assert observation.tolist() == [[100]] * 2
        assert np.stack(infos["final_obs"]).tolist() == [[104]] * 2


def test_gymnasium_wrappers_get_the_same_data(make_envs: MakeEnvs) -> None:
    def wrap(envs: Any) -> Any:
        return NormalizeReward(NormalizeObservation(RecordEpisodeStatistics(envs)))

    ours = wrap(make_envs("CartPole-v1", 4))
    envs = [partial(gymnasium.make, "CartPole-v1")] * 4
    with contextlib.closing(wrap(SyncVectorEnv(envs))) as theirs:
        assert_equal_resets(ours.reset(seed=2), theirs.reset(seed=2))
        episodes = 0
        for step in range(60):
            actions = (np.arange(4) // 2 + step) % 2
            *rows, infos = ours.step(actions)
            *expected, expected_infos = theirs.step(actions)
            assert_equal_rows(rows, expected)
            assert infos.keys() == expected_infos.keys()
            if "episode" in infos:
                episodes += infos["_episode"].sum()
                for key in ("r", "l"):  # "t", the elapsed time, differs
                    pair = infos["episode"][key], expected_infos["episode"][key]
                    assert_equal_rows(*pair)
        assert episodes >= 4


def test_observations_are_not_overwritten_unless_copy_is_false(
    make_envs: MakeEnvs,
) -> None:
    for copy in (True, False):
        envs = make_envs("CartPole-v1", seed=0, copy=copy)
        envs.reset(seed=0)
        first, *first_others, _ = envs.step([0, 0, 0, 0])
        kept = first.copy(), [array.copy() for array in first_others]
        second, *_ = envs.step([0, 0, 0, 0])
        assert second is not first
        assert (envs.step([0, 0, 0, 0])[0] is first) == (not copy)
        assert (first == kept[0]).all() == copy
        assert_equal_rows(first_others, kept[1])


def test_attributes_are_read_and_set(make_envs: MakeEnvs, shared_address: str) -> None:
    envs = make_envs("CartPole-v1", 3)
    assert envs.render_mode is None
    assert envs.metadata["render_fps"] == 50
    assert len(set(envs.np_random_seed)) == 3  # of 128 bits
    envs.reset(seed=[3, 5, 7])
    assert envs.np_random_seed == (3, 5, 7)
    assert envs.get_attr("render_mode") == (None, None, None)
    with pytest.raises(ValueError, match=r"expected reset\(\) instead of call"):
        envs.call("reset")
    if shared_address:
        with pytest.raises(CallError, match="not allowed"):
            envs.set_attr("gravity", 1.0)
        return
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        envs.get_attr("nothing")
    assert envs.get_attr("_max_episode_steps") == (500,) * 3
    assert envs.get_attr("__str__") == envs.call("__str__")
    envs.set_attr("gravity", 5.5)
    assert envs.call("gravity") == (5.5, 5.5, 5.5)
    assert envs.call("has_wrapper_attr", name="gravity") == (True, True, True)
    envs.set_attr("gravity", [1.0, 2.0, 3.0])
    assert envs.get_attr("gravity") == (1.0, 2.0, 3.0)
    with pytest.raises(ValueError, match="expected 3 values, one per env; got 2"):
        envs.set_attr("gravity", [1.0, 2.0])


def test_spaces_generators_and_specs_are_attributes(make_envs: MakeEnvs) -> None:
    envs = make_envs("CartPole-v1", 2)
    ours = envs.get_attr("action_space"), envs.get_attr("observation_space")
    assert ours == (
        (envs.single_action_space,) * 2,
        (envs.single_observation_space,) * 2,
    )
    assert envs.get_attr("spec") == (gymnasium.spec("CartPole-v1"),) * 2
    observation, _ = envs.reset(seed=3)
    for row, generator in enumerate(envs.np_random):
        env = gymnasium.make("CartPole-v1")
        assert_equal_rows(env.reset(seed=3 + row)[0], observation[row])
        assert generator.random() == env.unwrapped.np_random.random()


def test_calls_can_be_started_and_awaited(make_envs: MakeEnvs) -> None:
    envs = make_envs("CartPole-v1", 3)
    with pytest.raises(NoAsyncCallError, match="`call_wait` without"):
        envs.call_wait()
    envs.call_async("render_mode")
    with pytest.raises(AlreadyPendingCallError, match="pending call to `call`"):
        envs.reset()
    assert envs.call_wait() == (None, None, None)
    envs.call_async("nothing")
    with pytest.raises(CallError):
        envs.call_wait()
    envs.reset()


def test_a_call_can_be_awaited_again_after_a_timeout() -> None:
    class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
        def wait(self, path: str) -> int:
            with Path(path).open() as fifo:  # until the test opens it too
                return len(fifo.read())

    def make() -> gymnasium.Env[Any, Any]:
        return Slow(gymnasium.make("CartPole-v1"))

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(make_vec([make])) as envs,
    ):
        path = f"{folder}/fifo"
        os.mkfifo(path)
        envs.call_async("wait", path)
        with pytest.raises(TimeoutError):
            envs.call_wait(timeout=0.01)
        Path(path).write_text("abc")
        assert envs.call_wait(timeout=60) == (3,)


def make_box(high: float, shape: tuple[int, ...] = (2,)) -> Any:
    space = gymnasium.spaces.Box(0, high, shape)
    return lambda: TransformObservation(
        gymnasium.make("CartPole-v1"), lambda _: np.ones(shape, np.float32), space
    )


def test_observation_spaces_may_have_different_bounds() -> None:
    functions = [make_box(high) for high in (1, 2, 3)]
    with (
        contextlib.closing(make_vec(functions, observation_mode="different")) as ours,
        contextlib.closing(
            SyncVectorEnv(functions, observation_mode="different")
        ) as theirs,
    ):
        assert ours.observation_space == theirs.observation_space
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.reset()[0] in ours.observation_space
        assert ours.step([0, 0, 0])[0] in ours.observation_space
    single = gymnasium.spaces.Box(0, 9, (2,))
    mode = gymnasium.vector.utils.batch_space(single, 3), single
    with contextlib.closing(make_vec(functions, observation_mode=mode)) as envs:
        assert (envs.observation_space, envs.single_observation_space) == mode
    with pytest.raises(RuntimeError, match="use `observation_mode='different'`"):
        make_vec(functions)
    with pytest.raises(RuntimeError, match=r"differ from th(ose|e spaces) of"):
        make_vec([make_box(1), make_box(1, (3,))], observation_mode="different")
    with pytest.raises(ValueError, match="Invalid `observation_mode`"):
        make_vec(functions, observation_mode="similar")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="to be Spaces"):
        make_vec(functions, observation_mode=(1, 2))


@pytest.mark.parametrize("mode", MODES)
def test_actions_outside_their_space_are_passed_as_in_gymnasium(
    make_envs: MakeEnvs, mode: str
) -> None:
    ours = make_envs("Pendulum-v1", 2, autoreset_mode=mode)
    clipped = make_envs("Pendulum-v1", 2, autoreset_mode=mode, actions="clip")
    envs = [partial(gymnasium.make, "Pendulum-v1")] * 2
    with contextlib.closing(SyncVectorEnv(envs, autoreset_mode=mode)) as theirs:
        for each in (ours, clipped, theirs):
            each.reset(seed=1)
        actions = np.array([[5.0], [-0.5]], np.float32)
        expected = theirs.step(actions)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_equal_rows(ours.step(actions)[:4], expected[:4])
        assert_equal_rows(clipped.step(actions)[0], expected[0])
        with pytest.raises(ActionError, match="is not finite"):
            ours.step(np.full((2, 1), np.nan))


def test_a_reset_mask_alone_gives_envs_empty_options(make_envs: MakeEnvs) -> None:
    envs = make_envs("envserve/Reset-v0", 2, autoreset_mode="Disabled")
    envs.reset()
    _, infos = envs.reset(options={"reset_mask": np.array([True, False])})
    assert infos["options"] == {}
    assert infos["_options"].tolist() == [True, False]


def test_without_autoreset_an_ended_env_is_stepped_as_in_gymnasium(
    make_envs: MakeEnvs,
) -> None:
    wrappers = [{"name": "TimeLimit", "max_episode_steps": 2}]
    envs = make_envs(
        "envserve/Faulty-v0", 2, autoreset_mode="Disabled", wrappers=wrappers
    )
    envs.reset()
    for count in range(1, 4):
        observation, *_, truncated, _ = envs.step([0, 0])
        assert observation[:, 0].tolist() == [count, count]
        assert truncated.all() == (count >= 2)
    assert envs.step([0, 1])[3][1]
    with pytest.raises(LocalProtocolError, match=r"envs \[1\] have ended"):
        envs.step([0, 0])


def test_errors_are_instances_of_the_exception_that_the_env_raised(
    make_envs: MakeEnvs,
) -> None:
    envs = make_envs("envserve/Reset-v0", 2)
    with pytest.raises(ValueError, match="there is no level 13") as caught:
        envs.reset(options={"level": 13})
    error = pickle.loads(pickle.dumps(caught.value))
    for each in (caught.value, error):
        assert isinstance(each, EnvError)
        assert isinstance(each, ValueError)
        assert str(each) == str(caught.value)
    envs = make_envs("envserve/Faulty-v0", 2, on_fault="raise")
    envs.reset()
    with pytest.raises(RuntimeError, match="lost its balance") as raised:
        envs.step([0, 1])
    assert isinstance(raised.value, EnvError)


def test_final_observations_have_the_types_that_envs_return() -> None:
    space = gymnasium.spaces.Dict(
        a=gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3)] * 2),
        b=gymnasium.spaces.Box(-1, 1, ()),
    )

    def make() -> gymnasium.Env[Any, Any]:
        env = TimeLimit(gymnasium.make("CartPole-v1").unwrapped, 1)
        last = {"a": (1, 2), "b": np.array(0.5, np.float32)}
        return TransformObservation(env, lambda _: last, space)

    with contextlib.closing(make_vec([make], autoreset_mode="SameStep")) as envs:
        envs.reset()
        (last,) = envs.step([0])[4]["final_obs"]
    assert [type(each) for each in last["a"]] == [int, int]
    assert last["a"] == (1, 2)
    assert (type(last["b"]), last["b"].shape) == (np.ndarray, ())


def test_envs_render(make_envs: MakeEnvs) -> None:
    envs = make_envs("CartPole-v1", 2, env_kwargs={"render_mode": "rgb_array"})
    assert envs.render_mode == "rgb_array"
    envs.reset()
    pictures = envs.render()
    assert [picture.shape for picture in pictures] == [(400, 600, 3)] * 2


def test_using_closed_envs_raises_an_error(make_envs: MakeEnvs) -> None:
    envs = make_envs("CartPole-v1")
    envs.reset()
    assert not envs.closed
    with pytest.raises(TypeError, match="timout"):
        envs.close(timout=1)
    envs.close(timeout=1, terminate=True)
    envs.close()
    assert envs.closed
    for use in (envs.reset, partial(envs.step, [0] * 4), partial(envs.call, "render")):
        with pytest.raises(ClosedEnvironmentError, match="is closed"):
            use()


def test_garbage_collected_envs_are_closed(make_envs: MakeEnvs) -> None:
    batch = make_envs("CartPole-v1")._batch
    with pytest.raises(LocalProtocolError, match="already closed"):
        batch.reset()


def test_invalid_arguments_of_reset_are_errors(make_envs: MakeEnvs) -> None:
    envs = make_envs("CartPole-v1", autoreset_mode="Disabled")
    envs.reset()
    seed: Any
    options: Any
    for seed, options, error in (
        ([1, 2], None, r"an int, or one seed for each of 4 envs; got \[1, 2\]"),
        (1.5, None, r"^seed: expected an int, .*; got 1\.5"),
        ("a", None, "^seed: expected an int, .*; got 'a'"),
        (-1, None, r"^seed: expected an int in \[0, 2\*\*63\); got -1"),
        ([1, 2, 3, 4.5], None, r"^seed: expected an int in .*; got 4\.5"),
        (None, {"reset_mask": [True] * 4}, "must be a numpy array"),
        (None, {"reset_mask": np.ones(3, np.bool_)}, r"must have shape `\(4,\)`"),
        (None, {"reset_mask": np.ones(4, np.int64)}, "dtype=np.bool_`, got int64"),
        (None, {"reset_mask": np.zeros(4, np.bool_)}, "at least one True value"),
        (None, 5, "^options: expected a dict or None; got 5"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            envs.reset(seed=seed, options=options)


def test_invalid_arguments_of_make_vec_are_errors() -> None:
    with pytest.raises(ValueError, match="each server sets it"):
        make_vec("CartPole-v1", 2, ["tcp://127.0.0.1:1"], num_workers=2)
    with pytest.raises(ValueError, match="expected 'SameStep'"):
        make_vec("CartPole-v1", 2, autoreset_mode="never")
