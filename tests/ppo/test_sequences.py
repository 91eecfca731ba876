"""Recurrent policies: the update reproduces the states, ratios and values of acting."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

from envserve.slab import Status
from ppo.agent.agent import Agent
from ppo.config import Config
from ppo.learning.samples import SequenceSampler
from ppo.rollout import Rollout
from ppo.simulate import Simulation
from tests.ppo import runs
from tests.ppo.fakes import ACTIONS, BOX, ScriptedBatchEnv, in_graph
from tests.ppo.runs import Learner, copy, fill_masked, no_retracing, rollout_of

# Episodes that end at every position in sequences of 4, in every way, also in
# consecutive steps; episodes that continue after padding and late results; an endless
# episode.
SCRIPTS = ["...T", "....C", "T.C", "..PPX..", "..PPL...C", "."]
SPACES = {"gaussian": ACTIONS, "categorical": gymnasium.spaces.Discrete(3)}
CONFIG = Config(
    env_name="fake",
    num_envs=len(SCRIPTS),
    horizon=12,
    total_steps=10 * 12 * len(SCRIPTS),
    epochs=2,
    minibatch_size=72,
    learning_rate=1e-2,
    recurrent_size=5,
    policy_layers=(8,),
    value_layers=(8,),
    jit_compile=False,
)


EVERYTHING: dict[str, Any] = {
    "sequence_length": 4,
    "objective": "clip_and_penalty",
    "max_kl": 10.0,
    "value_clip_range": 0.2,
}
#: Sequences as long as the rollout, which is short because each step is traced.
WHOLE: dict[str, Any] = {"horizon": 6, "minibatch_size": 12}


def make(kind: str = "gaussian", **changes: Any) -> Agent:
    """Return an agent with large parameters, so that its recurrent state matters."""
    agent = Agent(BOX, SPACES[kind], CONFIG.replace(**changes))
    for index, variable in enumerate(agent.trainable_variables):
        numbers = 0.3 * np.sin(index + np.arange(variable.numpy().size))
        variable.assign(variable + numbers.reshape(variable.shape))
    return agent


def acting(
    agent: Agent,
    kind: str = "gaussian",
    num_splits: int = 1,
    on_step: Callable[[], None] = lambda: None,
    **changes: Any,
) -> Simulation:
    config = CONFIG.replace(**changes)
    fake = ScriptedBatchEnv(
        SCRIPTS[: config.num_envs], num_splits=num_splits, action_space=SPACES[kind]
    )
    return runs.agent_simulation(
        agent,
        in_graph(fake),
        config.horizon,
        sequence_length=config.sequence_length,
        on_step=on_step,
    )


def collect(simulation: Simulation, count: int) -> list[Rollout]:
    return [copy(simulation.run((1, number))) for number in range(count)]


class Replay(NamedTuple):
    """The outputs of an agent for a rollout, computed row by row."""

    states: np.ndarray  # [2, T, B, units], before each step
    log_prob: np.ndarray  # [T, B]
    value: np.ndarray  # [T + 1, B]
    final_value: np.ndarray  # [T, B]


def replay(agent: Agent, rollouts: list[Rollout]) -> list[Replay]:
    """Compute consecutive rollouts row by row, with the scripts' episode ends."""
    num_envs = rollouts[0].reward.shape[1]
    states = [np.zeros((num_envs, 5), np.float32) for _ in range(2)]
    replays = []
    for index, rollout in enumerate(rollouts):
        before, log_prob, value, final_value = [], [], [], []
        for step in range(len(rollout.reward)):
            before.append(np.stack(states))
            features = agent.preprocess(tf.constant(rollout.observation[step]))
            outputs = [
                memory.advance(embedding, tf.constant(state))
                for memory, embedding, state in zip(
                    agent.cores, agent.embed(features), states, strict=True
                )
            ]
            distribution = agent.distribution(features, outputs[0])
            log_prob.append(distribution.log_prob(tf.constant(rollout.action[step])))
            value.append(agent.value(features, outputs[1]))
            final = rollout.final_observation[step]
            final_value.append(value_of(agent, final, outputs[1]))
            number = index * len(rollout.reward) + step
            for row in range(num_envs):
                script = SCRIPTS[row]
                letter = script[number % len(script)]
                for state, output in zip(states, outputs, strict=True):
                    if letter in "TCX":
                        state[row] = 0.0
                    elif letter != "P":
                        state[row] = output[row]
        value.append(value_of(agent, rollout.observation[-1], states[1]))
        replays.append(
            Replay(*map(np.array, (np.stack(before, 1), log_prob, value, final_value)))
        )
    return replays


def value_of(agent: Agent, observation: np.ndarray, state: Any) -> tf.Tensor:
    features = agent.preprocess(tf.constant(observation))
    _, embedding = agent.embed(features)
    output = agent.cores[1].advance(embedding, tf.constant(state))
    return agent.value(features, output)


@pytest.mark.parametrize(
    ("kind", "num_splits"), [("gaussian", 1), ("categorical", 2), ("gaussian", 3)]
)
def test_the_recurrent_state_depends_on_the_current_episode_only(
    kind: str, num_splits: int
) -> None:
    agent = make(kind)
    rollouts = collect(acting(agent, kind, num_splits, sequence_length=1), 2)
    for rollout, expected in zip(rollouts, replay(agent, rollouts), strict=True):
        assert expected.states.any(axis=(0, 3)).mean() > 0.5
        np.testing.assert_allclose(np.stack(rollout.state), expected.states, atol=1e-5)
        np.testing.assert_allclose(rollout.log_prob, expected.log_prob, atol=1e-5)


def test_rollouts_store_the_states_at_the_start_of_sequences() -> None:
    agent = make()
    rollouts = collect(acting(agent, sequence_length=4), 2)
    for rollout, expected in zip(rollouts, replay(agent, rollouts), strict=True):
        assert rollout.state[0].shape == (3, len(SCRIPTS), 5)
        stored = np.stack(rollout.state)
        np.testing.assert_allclose(stored, expected.states[:, ::4], atol=1e-5)


def learn(kind: str, *, is_eager: bool = False, **changes: Any) -> Learner:
    agent = make(kind, **changes)
    rollout = collect(acting(agent, kind, **changes), 2)[1]
    return Learner(agent, CONFIG.replace(**changes), rollout, is_eager=is_eager)


@functools.cache
def learner(name: str) -> Learner:
    return {
        "compiled": lambda: learn("gaussian", **EVERYTHING, jit_compile=True),
        "eager": lambda: learn("gaussian", is_eager=True, **EVERYTHING),
        "categorical": lambda: learn("categorical", **WHOLE),
    }[name]()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [("compiled", "gaussian", EVERYTHING), ("categorical", "categorical", WHOLE)],
)
def test_the_ratio_is_one_before_the_first_gradient_step(
    name: str, kind: str, changes: dict[str, Any], num_splits: int
) -> None:
    subject = learner(name)
    subject.rewind()
    simulation = acting(subject.agent, kind, num_splits, **changes)
    for iteration in range(4):
        rollout = simulation.run((1, iteration))
        learned = subject.update_again(rollout, seed=(3, iteration))
        assert learned["ratio_deviation"] < 1e-4
        assert learned["approximate_kl"] > 1e-6
    # The policy has changed, so the same rollout now has different ratios.
    again = subject.update_again(rollout, seed=(3, 9))
    assert again["ratio_deviation"] > 1e-3


def test_sequences_start_from_the_states_of_acting() -> None:
    """Batch-ppo trained chunks from zero states.

    Their old log-probabilities, however, were computed from the true states.
    """
    subject = learner("compiled")
    assert subject.outcome(subject.rollout)[0]["ratio_deviation"] < 1e-4
    zero_states = tuple(np.zeros_like(states) for states in subject.rollout.state)
    forgotten = subject.rollout._replace(state=zero_states)
    assert subject.outcome(forgotten)[0]["ratio_deviation"] > 0.01


@pytest.mark.parametrize("sequence_length", [0, 4])
def test_values_depend_on_all_observations_of_the_episode(sequence_length: int) -> None:
    agent = make()
    rollouts = collect(acting(agent, sequence_length=sequence_length), 2)
    for rollout, expected in zip(rollouts, replay(agent, rollouts), strict=True):
        value, final_value = values(agent, rollout, sequence_length=sequence_length)
        np.testing.assert_allclose(value, expected.value, atol=1e-5)
        done = rollout.done
        np.testing.assert_allclose(
            final_value[done], expected.final_value[done], atol=1e-5
        )


def values(
    agent: Agent, rollout: Rollout, **changes: Any
) -> tuple[np.ndarray, np.ndarray]:
    config = CONFIG.replace(**changes)
    rows, final_rows = (
        agent.preprocess(tf.constant(array.reshape(-1, array.shape[-1])))
        for array in (rollout.observation, rollout.final_observation)
    )
    tensors = tf.nest.map_structure(tf.constant, rollout)
    value, final_value = SequenceSampler(agent, config).values(
        tensors, rows, final_rows
    )
    return value.numpy(), final_value.numpy()


def test_the_value_after_truncation_uses_the_recurrent_state_of_the_episode() -> None:
    """Check numbers by hand: the new state is (state + tanh(x)) / 2."""
    config: dict[str, Any] = {
        "num_envs": 1,
        "horizon": 4,
        "total_steps": 4,
        "minibatch_size": 4,
    }
    agent = Agent(
        gymnasium.spaces.Box(-9.0, 9.0, (1,), np.float64),
        ACTIONS,
        CONFIG.replace(
            **config,
            recurrent_size=1,
            policy_layers=(),
            value_layers=(),
            normalize_observations=False,
        ),
    )
    kernel, recurrent_kernel, bias = agent.cores[1].trainable_variables
    kernel.assign([[0.0, 0.0, 1.0]])  # update and reset gates are 1/2
    recurrent_kernel.assign([[0.0, 0.0, 0.0]])
    bias.assign(np.zeros((2, 3)))
    head = agent.trainable_variables[3:5]
    head[0].assign([[10.0]])
    head[1].assign([1.0])
    # The second step is truncated. The numbers are tanh(x). The initial state is 0.4.
    observation = np.arctanh([0.8, 0.0, 0.4, -0.6, 0.2])
    final = np.arctanh([0.0, -0.9, 0.0, 0.0])
    rollout = rollout_of(
        4,
        observation=observation[:, None, None],
        truncated=np.array([[False], [True], [False], [False]]),
        final_observation=final[:, None, None],
        state=(np.zeros((1, 1, 1), np.float32), np.full((1, 1, 1), 0.4, np.float32)),
    )
    value, final_value = values(agent, rollout, **config)
    # States: 0.4 -> 0.6 -> 0.3 | 0 -> 0.2 -> -0.2 -> 0.0 (after the last step).
    np.testing.assert_allclose(value[:, 0], [7.0, 4.0, 3.0, -1.0, 1.0], atol=1e-5)
    # State: 0.3 / 2 - 0.9 / 2 = -0.3. From a zero state, it would be -0.45.
    assert final_value[1, 0] == pytest.approx(-2.0, abs=1e-5)


@pytest.mark.parametrize("garbage", [1e9, np.nan, np.inf])
def test_the_contents_of_invalid_rows_do_not_matter(garbage: float) -> None:
    subject = learner("compiled")
    assert (~subject.rollout.valid).sum() == 9
    clean_metrics, clean = subject.outcome(subject.rollout)
    dirty_metrics, dirty = subject.outcome(fill_masked(subject.rollout, garbage))
    assert np.isfinite(list(clean_metrics.values())).all()
    assert clean_metrics == dirty_metrics
    np.testing.assert_array_equal(clean, dirty)


def test_the_observation_of_a_late_row_affects_the_recurrent_state() -> None:
    subject = learner("compiled")
    changed = copy(subject.rollout)
    is_late = changed.status == Status.LATE
    assert is_late[:-1].any()
    changed.observation[:-1][is_late] += 1.0
    assert subject.outcome(subject.rollout)[0]["ratio_deviation"] < 1e-4
    assert subject.outcome(changed)[0]["ratio_deviation"] > 1e-3


def test_updates_with_and_without_xla_agree() -> None:
    # One minibatch, because the random numbers of shuffling differ.
    rollout = learner("compiled").rollout
    metrics, parameters = learner("compiled").outcome(rollout)
    with no_retracing("embed"):
        learner("compiled").outcome(rollout, seed=(3, 6))
    eager_metrics, eager_parameters = learner("eager").outcome(rollout)
    assert metrics == pytest.approx(eager_metrics, rel=1e-3, abs=1e-5)
    np.testing.assert_allclose(parameters, eager_parameters, atol=2e-5)


def test_minibatches_contain_each_whole_sequence_once() -> None:
    sequences = SequenceSampler(make(), CONFIG.replace(sequence_length=4))
    time, env = np.divmod(np.arange(72), 6)
    rows = sequences.reorder(tf.constant(np.stack([time, env], axis=1)))  # [T * B, 2]
    # Six envs of three sequences each.
    for index, sequence in enumerate(rows.numpy().reshape(18, 4, 2)):
        assert sequence[:, 0].tolist() == [4 * (index // 6) + n for n in range(4)]
        assert set(sequence[:, 1]) == {index % 6}
    samples = {"rows": rows, "state": tf.range(18)[:, None]}
    minibatches = sequences.minibatches(samples, 6, tf.constant([1, 2]))
    assert minibatches["rows"].shape == (6, 12, 2)
    assert minibatches["state"].shape == (6, 3, 1)
    numbers = minibatches["state"].numpy().ravel()
    assert sorted(numbers) == list(range(18))
    assert list(numbers) != list(range(18))
    expected = rows.numpy().reshape(18, 4, 2)[numbers]
    np.testing.assert_array_equal(
        minibatches["rows"].numpy().reshape(18, 4, 2), expected
    )


def test_an_interrupted_rollout_resets_the_recurrent_state() -> None:
    on_step = mock.Mock()
    simulation = acting(make(), on_step=on_step)
    collect(simulation, 1)
    on_step.side_effect = InterruptedError
    with pytest.raises(InterruptedError):
        collect(simulation, 1)
    on_step.side_effect = None
    (rollout,) = collect(simulation, 1)
    assert not any(states.any() for states in rollout.state)
