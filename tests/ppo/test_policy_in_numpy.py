"""`Agent.in_numpy` returns the same as `Agent.act_from`, up to rounding."""

import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium.vector.utils import concatenate, create_empty_array

from ppo.agent.agent import Agent
from ppo.config import Config
from tests.ppo.fakes import CountingBatchEnv, in_graph
from tests.ppo.runs import SMALL, agent_simulation

SPACES = gymnasium.spaces
NUM_ROWS = 7
INT8: Any = np.int8
INT64: Any = np.int64
UINT8: Any = np.uint8
UINT64: Any = np.uint64
FLOAT64: Any = np.float64
VECTOR = SPACES.Box(-np.inf, np.inf, (5,), FLOAT64)
OBSERVATION_SPACES = {
    "vector": VECTOR,
    "matrix": SPACES.Box(-1.0, 1.0, (2, 3)),
    "grid": SPACES.Box(0, 255, (4, 4), UINT8),
    "nested": SPACES.Dict(
        a=SPACES.Box(-1.0, 1.0, (2, 2)),
        b=SPACES.Discrete(4, start=2),
        c=SPACES.MultiDiscrete(np.array([[2, 3]]), start=np.array([[1, -1]])),
        d=SPACES.MultiBinary((2, 2)),
        e=SPACES.Tuple((SPACES.Box(0, 9, (3,), INT64), SPACES.Discrete(2))),
    ),
}
HALF_BOUNDED = SPACES.Box(
    np.array([0.0, -np.inf], np.float32), np.array([np.inf, 3.0], np.float32)
)
MAX = np.finfo(np.float32).max
BOXES = {
    "box": SPACES.Box(-1.0, 1.0, (3,)),
    "asymmetric": SPACES.Box(-2.0, 5.0, (2, 2), FLOAT64),
    "integers": SPACES.Box(0, 9, (2,), INT8),
    "unbounded": SPACES.Box(-np.inf, np.inf, (1,)),
    "unbounded integers": SPACES.Box(-np.inf, np.inf, (2,), INT64),
    "half bounded": HALF_BOUNDED,
    "largest": SPACES.Box(-MAX, MAX, (2,)),
    "largest integers": SPACES.Box(0, 2**64 - 1, (9,), UINT64),
    "large integers": SPACES.Box(0, 2**62 - 1, (9,), INT64),
}
CHOICES = {
    "discrete": SPACES.Discrete(6, start=3),
    "multi": SPACES.MultiDiscrete([2, 3], start=[5, -1]),
    "matrix of choices": SPACES.MultiDiscrete(np.array([[2, 2], [2, 2]])),
    "bits": SPACES.MultiBinary((2, 2)),
}
RECURRENT = {"recurrent_size": 8, "sequence_length": 16}


def check(
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    **settings: Any,
) -> None:
    """Compare both forms of an agent with random parameters and statistics."""
    config = Config(env_name="any", network="mlp", **settings)
    agent = Agent(observation_space, action_space, config)
    generator = np.random.default_rng(0)
    for variable in agent.trainable_variables:
        variable.assign_add(0.1 * generator.normal(size=variable.shape))
    observation_space.seed(1)
    agent.preprocess.update(rows_of(observation_space), np.ones(NUM_ROWS, np.bool_))
    observation = rows_of(observation_space)
    state = [
        generator.uniform(-1, 1, (NUM_ROWS, size)).astype(np.float32)
        for size in agent.state_sizes
    ]
    noise = agent.actions.noise(NUM_ROWS, tf.constant((1, 2)))
    snapshot = agent.snapshot()
    expected = agent.act_from(snapshot, observation, noise, *map(tf.constant, state))
    act = agent.in_numpy(snapshot, NUM_ROWS)
    assert act is not None
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(observation)]
    env_action, *got = act(leaves, noise.numpy(), *state)
    assert_close(env_action, agent.actions.to_env_action(expected[0]))
    assert all(row in action_space for row in env_action)
    tf.nest.map_structure(assert_close, got, list(expected))


def rows_of(space: gymnasium.Space[Any]) -> Any:
    rows = [space.sample() for _ in range(NUM_ROWS)]
    empty: Any = create_empty_array(space, NUM_ROWS)
    return concatenate(space, rows, empty)


def assert_close(got: np.ndarray, expected: tf.Tensor) -> None:
    assert got.dtype == expected.dtype.as_numpy_dtype
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected.numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("observation", OBSERVATION_SPACES)
@pytest.mark.parametrize("action", ["box", "discrete"])
def test_observation_spaces(observation: str, action: str) -> None:
    check(OBSERVATION_SPACES[observation], (BOXES | CHOICES)[action])


@pytest.mark.parametrize(
    ("action", "settings"),
    [
        *itertools.product(
            BOXES, [{}, {"state_dependent_std": True, "initial_log_std": -1.0}]
        ),
        *itertools.product(
            ["box", "asymmetric", "integers"],
            [{"action_distribution": "squashed_gaussian"}],
        ),
        *itertools.product(CHOICES, [{}]),
    ],
)
def test_action_spaces(action: str, settings: dict[str, Any]) -> None:
    check(VECTOR, (BOXES | CHOICES)[action], **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation": "relu"},
        {"activation": "elu"},
        {"activation": "silu"},
        {"policy_layers": ()},
        {"normalize_observations": False},
        {"observation_clip": 0.3},
        RECURRENT,
        RECURRENT | {"activation": "elu"},
        RECURRENT | {"policy_layers": (), "value_layers": ()},
    ],
    ids=str,
)
def test_networks(settings: dict[str, Any]) -> None:
    check(VECTOR, BOXES["box"], **settings)


@pytest.mark.parametrize(
    ("mask", "action"),
    [
        (SPACES.MultiBinary(6), "discrete"),
        (SPACES.Box(0, 1, (6,), INT8), "discrete"),
        (SPACES.Tuple((SPACES.MultiBinary(2), SPACES.MultiBinary(3))), "multi"),
        (SPACES.MultiBinary(5), "multi"),
    ],
)
def test_action_masks(mask: gymnasium.Space[Any], action: str) -> None:
    space = SPACES.Dict(action_mask=mask, a=VECTOR, z=SPACES.Discrete(3))
    check(space, CHOICES[action])


@pytest.mark.parametrize(
    ("observation_space", "settings"),
    [
        (VECTOR, {"activation": "gelu"}),
        (SPACES.Box(0, 255, (8, 8), UINT8), {}),
        (VECTOR, {"network": "tests.ppo.custom_networks:subclass"}),
    ],
)
def test_other_networks_exist_only_in_tensorflow(
    observation_space: gymnasium.Space[Any], settings: dict[str, Any]
) -> None:
    config = Config(env_name="any", **settings)
    agent = Agent(observation_space, BOXES["box"], config)
    assert agent.in_numpy(agent.snapshot(), NUM_ROWS) is None


def test_a_subclass_of_the_agent_acts_in_rollouts() -> None:
    class Opposite(Agent):
        def act_from(
            self, snapshot: Any, observation: Any, noise: tf.Tensor, *state: tf.Tensor
        ) -> tuple[Any, ...]:
            action, *others = Agent.act_from(self, snapshot, observation, noise, *state)
            return -action, *others

    env = in_graph(CountingBatchEnv([3]))
    spaces = env.env.observation_space, env.env.action_space
    actions = [
        agent_simulation(kind(*spaces, SMALL), env, 4).run((1, 2), reset=True).action
        for kind in (Agent, Opposite)
    ]
    np.testing.assert_allclose(actions[1], -actions[0], rtol=1e-5)
