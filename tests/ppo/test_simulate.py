"""`Simulation`: contents of rollouts, continuity, and numbers of calls and traces."""

from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from ppo.errors import DivergedError, EnvDataError
from ppo.simulate import Simulation, simulate
from tests.ppo.fakes import CountingBatchEnv, ScriptedBatchEnv, in_graph

SPACES = gymnasium.spaces
NESTED = SPACES.Dict(
    image=SPACES.Box(0, 255, (2, 2), np.uint8),
    parts=SPACES.Tuple((SPACES.Discrete(9), SPACES.Box(-1.0, 9.0, (1,), np.float64))),
)


def observe_nested(rows: np.ndarray) -> Any:
    count = rows[:, 1]
    return {
        "image": np.tile(count[:, None, None], (1, 2, 2)).astype(np.uint8),
        "parts": (count.astype(np.int64), count[:, None]),
    }


def echo(observation: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return ten times the observed step count, which exceeds the action bounds."""
    del seed
    count = tf.cast(observation[:, 1], tf.float32)
    return 10.0 * count[:, None], -count


def random_policy(
    observation: tf.Tensor, seed: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    action = tf.random.stateless_normal([observation.shape[0], 1], seed)
    return action, action[:, 0]


def test_rollout_contains_observations_actions_and_results() -> None:
    fake = CountingBatchEnv([2, 3], terminates=[True, False])
    rollout = simulate(in_graph(fake), echo, horizon=4)
    counts = [[0, 0], [1, 1], [0, 2], [1, 0], [0, 1]]
    assert rollout.observation[:, :, 1].tolist() == counts
    assert rollout.observation[:, :, 0].tolist() == [[0, 1]] * 5
    # Actions are stored unclipped, matching the log-probabilities, but sent clipped.
    assert rollout.action[:, :, 0].tolist() == [[0, 0], [10, 10], [0, 20], [10, 0]]
    assert [a.ravel().tolist() for a in fake.actions] == [
        [0, 0],
        [1, 1],
        [0, 1],
        [1, 0],
    ]
    assert rollout.log_prob.tolist() == [[0, 0], [-1, -1], [0, -2], [-1, 0]]
    assert rollout.reward.tolist() == [[1, 1]] * 4
    assert rollout.terminated[:, 0].tolist() == [False, True, False, True]
    assert rollout.truncated[:, 1].tolist() == [False, False, True, False]
    assert rollout.final_observation[1, 0].tolist() == [0, 2]
    assert rollout.final_observation[2, 1].tolist() == [1, 3]
    assert rollout.valid.all()


def test_next_rollout_continues_where_the_last_one_ended() -> None:
    simulation = Simulation(in_graph(CountingBatchEnv([5])), echo, horizon=3)
    simulation.run((0, 0))
    rollout = simulation.run((0, 1))
    assert rollout.observation[:, 0, 1].tolist() == [3, 4, 0, 1]


def test_an_interrupted_reset_is_repeated() -> None:
    fake = CountingBatchEnv([9])
    simulation = Simulation(in_graph(fake), echo, horizon=3)
    simulation.run((0, 0))
    reset = fake.reset

    def interrupted_reset() -> None:
        reset()
        raise InterruptedError

    with (
        mock.patch.object(fake, "reset", interrupted_reset),
        pytest.raises(InterruptedError),
    ):
        simulation.run((0, 1), reset=True)
    assert simulation.run((0, 2)).observation[:, 0, 1].tolist() == [0, 1, 2, 3]


def test_with_a_gpu_the_default_executor_runs_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The single-threaded executor cannot call Python from a loop on the GPU."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    asked = mock.Mock(wraps=tf.experimental.function_executor_type)
    monkeypatch.setattr(tf.experimental, "function_executor_type", asked)
    rollout = simulate(in_graph(CountingBatchEnv([5])), echo, horizon=3)
    assert rollout.observation[:, 0, 1].tolist() == [0, 1, 2, 3]
    assert {call.args for call in asked.call_args_list} == {("DEFAULT",)}


def test_lost_steps_are_not_valid() -> None:
    fake = CountingBatchEnv([9, 9], lost=frozenset({(1, 0)}))
    rollout = simulate(in_graph(fake), echo, horizon=3)
    assert rollout.valid.tolist() == [[True, True], [False, True], [True, True]]
    assert rollout.observation[:, 0, 1].tolist() == [0, 1, 0, 1]


def test_policy_is_traced_once() -> None:
    fake = CountingBatchEnv([5, 5])
    policy = mock.Mock(side_effect=echo)
    simulation = Simulation(in_graph(fake), policy, horizon=7)
    simulation.run((0, 0))
    policy.side_effect = AssertionError("expected to be traced once")
    simulation.run((0, 1))
    simulation.run((0, 2))
    assert len(fake.actions) == 3 * 7


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda action, log_prob: (action[:, None], log_prob), r"actions \[2, 1\]"),
        (lambda action, log_prob: (action, log_prob, action), r"\(<tf.Tensor"),
        (lambda action, log_prob: action, "<tf.Tensor"),
        (lambda action, log_prob: ([*tf.unstack(action)], log_prob), r"\(\[<tf.Tensor"),
    ],
)
def test_policy_with_invalid_outputs_is_an_error_of_one_line(
    change: Any, found: str
) -> None:
    def policy(observation: tf.Tensor, seed: tf.Tensor) -> Any:
        return change(tf.zeros([2], tf.int64), tf.zeros([2]))

    expected = (
        r"policy: expected a tuple of actions \[2\] and log-.* parameters\), got "
    )
    fake = CountingBatchEnv([9, 9], action_space=SPACES.Discrete(3))
    with pytest.raises(ValueError, match=f"^{expected}{found}"):
        simulate(in_graph(fake), policy, 2)
    assert not fake.actions


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_policy_with_another_number_of_log_probabilities_is_an_error(
    shape: tuple[int, ...],
) -> None:
    def policy(observation: tf.Tensor, seed: tf.Tensor) -> Any:
        return tf.zeros([2, 3]), tf.zeros(shape)

    fake = CountingBatchEnv([9, 9], action_space=SPACES.Box(-1, 1, (3,)))
    with pytest.raises(ValueError, match=r"policy: .* got .* for 8 actions"):
        simulate(in_graph(fake), policy, 4)


def test_policy_in_numpy_replaces_the_policy() -> None:
    def in_numpy(snapshot: float, num_rows: int) -> Any:
        assert num_rows == 2

        def act(leaves: list[np.ndarray], noise: np.ndarray) -> tuple[Any, ...]:
            action = (snapshot * leaves[0][:, 1:]).astype(np.float32)
            return np.clip(action, -1, 1), action, (action[:, 0],)

        return act

    policy = mock.Mock(side_effect=AssertionError("expected not to be traced"))
    simulation = Simulation(
        in_graph(CountingBatchEnv([9, 2])),
        policy,
        horizon=3,
        snapshot=lambda: 2.0,
        in_numpy=in_numpy,
        log_prob=lambda action, parameters: action[:, 0] - 3.0 * parameters[0],
    )
    rollout = simulation.run((0, 0))
    assert rollout.action[:, :, 0].tolist() == [[0, 0], [2, 2], [4, 0]]
    assert rollout.log_prob.tolist() == [[0, 0], [-4, -4], [-8, 0]]


def test_rollout_is_one_operation_of_a_users_graph() -> None:
    """The policy's variables have the values that earlier operations assigned."""
    fake = CountingBatchEnv([5, 3])
    scale = tf.Variable(1.0)

    def policy(observation: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        action, log_prob = echo(observation, seed)
        return scale * action, log_prob

    simulation = Simulation(in_graph(fake), policy, horizon=2)

    @tf.function
    def collect_twice() -> tuple[Any, Any]:
        first = simulation.run(tf.constant((0, 0)))
        scale.assign(7.0)
        return first, simulation.run(tf.constant((0, 1)))

    first, second = collect_twice()
    assert first.action.shape == (2, 2, 1)
    assert first.action[:, :, 0].numpy().tolist() == [[0, 0], [10, 10]]
    assert second.action[:, :, 0].numpy().tolist() == [[140, 140], [210, 0]]
    assert second.observation[:, 0, 1].numpy().tolist() == [2, 3, 4]


def test_errors_reach_the_caller_of_a_users_graph() -> None:
    fake = CountingBatchEnv([5])

    def nan_policy(observation: Any, seed: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.fill([1, 1], np.nan), tf.zeros([1])

    env = in_graph(fake)
    collect = tf.function(lambda: simulate(env, nan_policy, 2))
    with pytest.raises(DivergedError, match="finite action"), env.original_errors():
        collect()


def test_rows_of_a_server_that_joins_later_do_not_cause_retracing() -> None:
    fake = ScriptedBatchEnv(["........", "PPPX...."])
    policy = mock.Mock(side_effect=echo)
    simulation = Simulation(in_graph(fake), policy, horizon=4)
    assert simulation.run((0, 0)).valid.tolist() == [[True, False]] * 4
    policy.side_effect = AssertionError("expected to be traced once")
    assert simulation.run((0, 1)).valid.all()


def test_noise_depends_only_on_seed_and_step() -> None:
    def actions(seed: tuple[int, int]) -> np.ndarray:
        env = in_graph(CountingBatchEnv([9, 9]))
        return simulate(env, random_policy, 4, seed).action

    np.testing.assert_array_equal(actions((1, 2)), actions((1, 2)))
    assert len(np.unique(actions((1, 2)))) == 8
    assert not np.isin(actions((1, 2)), actions((1, 3))).any()


def test_nested_observations_keep_their_structure_and_dtypes() -> None:
    fake = CountingBatchEnv([3, 5], observation_space=NESTED, observe=observe_nested)
    seen: list[Any] = []

    def policy(observation: Any, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        leaves = tf.nest.flatten(observation)
        seen.append([(leaf.dtype, leaf.shape.as_list()) for leaf in leaves])
        return tf.cast(observation["parts"][1], tf.float32), tf.zeros([2])

    rollout = simulate(in_graph(fake), policy, horizon=4)
    rows = [(tf.uint8, [2, 2, 2]), (tf.int64, [2]), (tf.float64, [2, 1])]
    assert seen == [rows, rows]  # traced once for its output shapes, once in the loop
    assert rollout.reward.dtype == np.float64
    assert rollout.truncated[2].tolist() == [True, False]
    assert rollout.observation["image"].dtype == np.uint8
    assert rollout.observation["image"].shape == (5, 2, 2, 2)
    assert rollout.observation["parts"][0][:, 0].tolist() == [0, 1, 2, 0, 1]
    assert rollout.observation["image"][:, 0, 1, 1].tolist() == [0, 1, 2, 0, 1]
    assert rollout.final_observation["parts"][0][2].tolist() == [3, 0]
    assert rollout.final_observation["parts"][1][2].tolist() == [[3.0], [0.0]]
    assert rollout.action[:, 1, 0].tolist() == [0, 1, 2, 3]


def test_discrete_actions_are_sent_as_integers() -> None:
    fake = CountingBatchEnv([9], action_space=gymnasium.spaces.Discrete(3, start=5))

    def policy(observation: Any, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.constant([2], tf.int64), tf.zeros([1])

    rollout = simulate(in_graph(fake), policy, horizon=1)
    assert rollout.action.tolist() == [[2]]
    assert fake.actions[0].tolist() == [7]


@pytest.mark.parametrize("number", [np.nan, np.inf, -1e200])
def test_observation_that_is_not_finite_or_too_large_raises_an_error_with_the_env_index(
    number: float,
) -> None:
    def observe(rows: np.ndarray) -> np.ndarray:
        return np.where((rows == [1.0, 2.0]).all(axis=1, keepdims=True), number, rows)

    fake = CountingBatchEnv([9, 9], observe=observe)
    with pytest.raises(EnvDataError, match=r"Env 1 .* finite observation leaf 0"):
        simulate(in_graph(fake), echo, horizon=5)
    # The policy turns NaN into actions that are rejected, but clips infinity.
    assert len(fake.actions) == (2 if np.isnan(number) else 5)


@pytest.mark.parametrize("terminates", [False, True])
def test_final_observation_must_be_finite_if_its_value_is_used(
    terminates: bool,
) -> None:
    def observe(rows: np.ndarray) -> np.ndarray:
        return np.where(rows[:, 1:] == 3.0, np.nan, rows)

    fake = CountingBatchEnv([2, 3], terminates=[False, terminates], observe=observe)
    env = in_graph(fake)
    if terminates:
        assert np.isnan(simulate(env, echo, horizon=5).final_observation[2, 1]).all()
    else:
        with pytest.raises(EnvDataError, match=r"Env 1 .* finite observation"):
            simulate(env, echo, horizon=5)


@pytest.mark.parametrize("bad", ["action", "log-probability"])
def test_diverged_policy_raises_another_error_than_a_faulty_env(bad: str) -> None:
    """Actions are checked before they are sent, log-probabilities after the rollout."""

    def nan_policy(observation: Any, seed: Any) -> tuple[tf.Tensor, tf.Tensor]:
        broken = tf.where(observation[:, 0] * observation[:, 1] == 2.0, np.nan, 0.0)
        broken = tf.cast(broken, tf.float32)
        if bad == "action":
            return broken[:, None], tf.zeros([2])
        return tf.zeros([2, 1]), broken

    fake = CountingBatchEnv([9, 9])
    with pytest.raises(DivergedError, match=rf"Env 1 .* finite {bad}, got .*nan.*"):
        simulate(in_graph(fake), nan_policy, horizon=5)
    assert len(fake.actions) == (2 if bad == "action" else 5)
