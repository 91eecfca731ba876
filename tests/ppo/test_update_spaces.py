"""The PPO update with images, an action mask and multi-discrete actions at once."""

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from ppo.agent.agent import Agent
from tests.ppo.fakes import CountingBatchEnv, in_graph
from tests.ppo.runs import SMALL, Learner, agent_simulation, fill_masked

ACTIONS = spaces.MultiDiscrete([2, 3])
OBSERVATIONS = spaces.Dict(
    action_mask=spaces.MultiBinary(5),
    camera=spaces.Box(0, 255, (8, 8, 3), np.uint8),
    parts=spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(2))),
    x=spaces.Box(-np.inf, np.inf, (2,), np.float64),
)
LOST = frozenset({(2, 0), (5, 1), (6, 1)})
CONFIG = SMALL.replace(
    total_steps=160,
    epochs=2,
    minibatch_size=4,
    entropy_coefficient=0.01,
    policy_layers=(8,),
    value_layers=(),
)


def observe(rows: np.ndarray) -> dict[str, Any]:
    count = rows[:, 1].astype(np.int64)
    masks = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [0, 0, 0, 0, 0]], np.int8)
    light = 20 * count + np.arange(192).reshape(8, 8, 3, 1)
    return {
        "action_mask": masks[count % 3],
        "camera": np.moveaxis(light, -1, 0).astype(np.uint8),
        "parts": (count % 4, np.stack([count % 2, count % 3 == 0], 1).astype(np.int8)),
        "x": rows,
    }


def learn(**changes: Any) -> Learner:
    config = CONFIG.replace(**changes)
    agent = Agent(OBSERVATIONS, ACTIONS, config)
    fake = CountingBatchEnv(
        [3, 4], terminates=[True, False], lost=LOST,
        action_space=ACTIONS, observation_space=OBSERVATIONS, observe=observe,
    )  # fmt: skip
    simulation = agent_simulation(
        agent, in_graph(fake), config.horizon, sequence_length=config.sequence_length
    )
    return Learner(agent, config, simulation.run((1, 2)))


@functools.cache
def learner(kind: str) -> Learner:
    """Return a learner; only one kind is compiled, to save time."""
    return {
        "shared": lambda: learn(jit_compile=True),
        "recurrent": lambda: learn(
            shared_torso=False,
            recurrent_size=6,
            sequence_length=4,
            objective="clip_and_penalty",
            value_clip_range=0.2,
        ),
    }[kind]()


@pytest.mark.parametrize("kind", ["shared", "recurrent"])
def test_learning_uses_the_observations_that_the_policy_acted_on(kind: str) -> None:
    subject = learner(kind)
    rollout = subject.rollout
    assert rollout.observation["camera"].dtype == np.uint8
    first = tf.nest.map_structure(lambda rows: rows[0], rollout.observation)
    features = subject.agent.preprocess(first)
    dtypes = tf.nest.map_structure(lambda leaf: leaf.dtype, features)
    # Images become float32 per minibatch; until then, they use a quarter of the memory.
    assert dtypes["camera"] == tf.uint8
    assert dtypes["action_mask"] == tf.bool
    taken = np.concatenate([np.eye(2)[rollout.action[..., 0]],
                            np.eye(3)[rollout.action[..., 1]]], axis=-1)  # fmt: skip
    mask = rollout.observation["action_mask"][:-1].astype(bool)
    for part in (slice(0, 2), slice(2, 5)):
        allowed = mask[..., part] | ~mask[..., part].any(axis=-1, keepdims=True)
        assert (taken[..., part] <= allowed)[rollout.valid].all()
    metrics, _ = subject.outcome()
    assert metrics["ratio_deviation"] < 1e-5
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["gradient_norm"] > 0
    _, again = subject.outcome()
    for variable, (_, before) in zip(
        subject.agent.trainable_variables, subject.start, strict=False
    ):
        assert (variable.numpy() != before).any(), variable.path
    assert np.isfinite(again).all()


@pytest.mark.parametrize("kind", ["shared", "recurrent"])
@pytest.mark.parametrize("garbage", [0, 1, 255])
def test_the_contents_of_invalid_rows_do_not_matter(garbage: int, kind: str) -> None:
    subject = learner(kind)
    clean = subject.rollout
    dirty = fill_masked(clean, garbage)
    # Even if the observation of an invalid row is used as the successor of another row,
    # its action mask is not, because no action was chosen with it.
    dirty.observation["action_mask"][:-1][~clean.valid] = garbage % 2
    metrics, parameters = subject.outcome(clean)
    dirty_metrics, dirty_parameters = subject.outcome(dirty)
    assert metrics == dirty_metrics
    np.testing.assert_array_equal(parameters, dirty_parameters)
