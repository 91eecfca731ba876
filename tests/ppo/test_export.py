"""Exported policies: loaded with TensorFlow alone, they act like the agent."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from ppo.agent.agent import Agent
from ppo.config import Config
from ppo.errors import OutputError, UnsupportedSpaceError
from ppo.evaluation.export import export_policy
from ppo.in_graph_batch_env import InGraphBatchEnv
from tests.ppo.fakes import BOX, CountingBatchEnv, in_graph
from tests.ppo.runs import ppo, save_run

pytestmark = pytest.mark.usefixtures("one_launcher")

CONFIG = Config(env_name="fake", policy_layers=(8,), value_layers=(8,))
SEED = [3, 4]
CASES: dict[str, tuple[gymnasium.Space[Any], gymnasium.Space[Any]]] = {
    "box": (BOX, spaces.Box(-3.0, 1.0, (2, 3), np.float32)),
    "dict": (
        spaces.Dict(
            {
                "a b": spaces.Box(-1.0, 1.0, (3,), np.float32),
                "a_b": spaces.Discrete(3, start=1),
                "camera": spaces.Box(0, 255, (4, 4), np.uint8),
            }
        ),
        spaces.Discrete(5, start=-2),
    ),
    "masked": (
        spaces.Dict(
            {
                "action_mask": spaces.MultiBinary(5),
                "camera": spaces.Box(0, 255, (3, 8, 8), np.uint8),
                "x": BOX,
            }
        ),
        spaces.MultiDiscrete([2, 3], start=[4, -1]),
    ),
    "image": (spaces.Box(0, 255, (4, 8, 8), np.uint8), spaces.MultiBinary((2, 2))),
    "tuple": (
        spaces.Tuple([spaces.Dict({"x": BOX}), spaces.MultiBinary(3)]),
        spaces.Box(np.array([-np.inf, 0.0]), np.array([np.inf, 5.0]), dtype=np.float64),
    ),
}

# Code that uses the model without having this project installed.
LOAD_AND_ACT = """
import gc, pickle, sys
gc.disable()  # imports would take longer
import tensorflow as tf
with open("observations.pickle", "rb") as file:
    observations = pickle.load(file)
actions = {}
for name, batches in observations.items():
    policy = tf.saved_model.load(name)
    actions[name] = [
        (policy.mode(rows).numpy(), policy.sample(rows, tf.constant([3, 4])).numpy())
        for rows in batches
    ]
assert not {"ppo", "envserve"} & set(sys.modules)
with open("actions.pickle", "wb") as file:
    pickle.dump(actions, file)
"""


def sampled(space: gymnasium.Space[Any], num_rows: int) -> Any:
    rows = [space.sample() for _ in range(num_rows)]
    return tf.nest.map_structure(lambda *leaves: np.stack(leaves), *rows)


def policy_of(name: str, config: Config = CONFIG) -> tuple[Agent, InGraphBatchEnv]:
    """Return an agent with observation statistics and large actions, and its env."""
    observation_space, action_space = CASES[name]
    fake = CountingBatchEnv(
        [3], observation_space=observation_space, action_space=action_space
    )
    agent = Agent(observation_space, action_space, config)
    agent.preprocess.update(sampled(observation_space, 20), tf.ones([20], tf.bool))
    for variable in agent.trainable_variables:
        variable.assign(variable + 0.3)
    return agent, in_graph(fake)


def assert_allowed(mask: np.ndarray, action: np.ndarray) -> None:
    """Check that actions obey their masks; an empty mask allows all."""
    for flags, choice in zip((mask[:, :2], mask[:, 2:]), action.T, strict=True):
        taken = flags[np.arange(len(flags)), choice]
        assert (taken | ~flags.any(axis=1)).all()


def test_a_loaded_model_returns_the_actions_of_the_agent(tmp_path: Path) -> None:
    policies, observations = {}, {}
    for name, (observation_space, _) in CASES.items():
        observation_space.seed(7)
        policies[name] = policy_of(name)
        export_policy(*policies[name], tmp_path / name)
        observations[name] = [sampled(observation_space, n) for n in (1, 5)]
    (tmp_path / "observations.pickle").write_bytes(pickle.dumps(observations))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", LOAD_AND_ACT]
    subprocess.run(command, cwd=tmp_path, check=True, env=environment)
    actions = pickle.loads((tmp_path / "actions.pickle").read_bytes())
    for name, (agent, env) in policies.items():
        space = env.env.action_space
        for rows, (mode, sample) in zip(observations[name], actions[name], strict=True):
            tensors = tf.nest.map_structure(tf.constant, rows)
            seed = tf.constant(SEED)
            for act, got in ((agent.mode, mode), (agent.act, sample)):
                expected = env.to_env_action(act(tensors, seed)[0]).numpy()
                assert got.dtype == space.dtype
                assert len(got) == len(tf.nest.flatten(rows)[0])
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
                assert all(action in space for action in got)
        assert (actions[name][1][0] != actions[name][1][1]).any(), (
            "sample returns the mode"
        )
    for rows, (mode, sample) in zip(
        observations["masked"], actions["masked"], strict=True
    ):
        for action in (mode, sample):
            assert_allowed(rows["action_mask"], action - [4, -1])


def test_signatures_have_a_named_input_for_every_leaf(tmp_path: Path) -> None:
    agent, env = policy_of("dict")
    export_policy(agent, env, tmp_path / "dict")
    loaded = tf.saved_model.load(str(tmp_path / "dict"))
    rows = tf.nest.map_structure(tf.constant, sampled(CASES["dict"][0], 2))
    action = loaded.signatures["serving_default"](
        observation_a_b=rows["a b"],
        observation_a_b_=rows["a_b"],
        observation_camera=rows["camera"],
    )
    np.testing.assert_array_equal(action["action"], loaded.mode(rows))
    assert set(loaded.signatures) == {"serving_default", "sample"}


def test_a_recurrent_model_accepts_and_returns_its_state(tmp_path: Path) -> None:
    config = CONFIG.replace(recurrent_size=6, minibatch_size=128)
    agent, env = policy_of("dict", config)
    export_policy(agent, env, tmp_path / "policy")
    loaded = tf.saved_model.load(str(tmp_path / "policy"))
    states = [loaded.initial_state(3)] * 2
    expected_states = [tf.zeros([3, 6])] * 2
    serve = loaded.signatures["sample"]
    for step in range(4):
        rows = tf.nest.map_structure(tf.constant, sampled(CASES["dict"][0], 3))
        seed = tf.constant([step, 1])
        got = [loaded.mode(rows, states[0]), loaded.sample(rows, states[1], seed)]
        expected = [
            agent.mode(rows, seed, expected_states[0]),
            agent.act(rows, seed, expected_states[1]),
        ]
        served = serve(
            observation_a_b=rows["a b"],
            observation_a_b_=rows["a_b"],
            observation_camera=rows["camera"],
            state=states[1],
            seed=seed,
        )
        np.testing.assert_array_equal(served["action"], got[1][0])
        np.testing.assert_array_equal(served["state"], got[1][1])
        states = [state for _, state in got]
        expected_states = [state for *_, state in expected]
        for (action, state), (live, _, live_state) in zip(got, expected, strict=True):
            np.testing.assert_array_equal(action, env.to_env_action(live))
            np.testing.assert_allclose(state, live_state, atol=1e-6)
    assert np.abs(states[0]).max() > 0.01


def test_keys_that_are_not_strings_are_an_error(tmp_path: Path) -> None:
    space = spaces.Dict({"x": spaces.Dict({3: BOX})})  # type: ignore[dict-item]
    agent = Agent(space, BOX, CONFIG)
    env = in_graph(CountingBatchEnv([3], observation_space=space, action_space=BOX))
    with pytest.raises(UnsupportedSpaceError, match=r"keys, .* got 3; rename the"):
        export_policy(agent, env, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_an_existing_folder_with_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    policy = policy_of("box")
    for folder in (tmp_path, tmp_path / "file", tmp_path / ("x" * 300)):
        with pytest.raises(OutputError, match="expected a new or empty folder"):
            export_policy(*policy, folder)
    with pytest.raises(OutputError, match=r"its path, .* is not UTF-8"):
        export_policy(*policy, tmp_path / "\udcff")
    with pytest.raises(OutputError, match="expected a writable folder"):
        export_policy(*policy, tmp_path / "file" / "model")
    (tmp_path / "precious").mkdir()
    (tmp_path / "policy.partial").symlink_to(tmp_path / "precious")
    export_policy(*policy, tmp_path / "policy")
    assert not any((tmp_path / "precious").iterdir())


def test_ppo_export_exports_the_chosen_checkpoint(tmp_path: Path) -> None:
    config = CONFIG.replace(env_name="CartPole-v1")
    save_run(tmp_path / "run", config, iterations=(1, 2))
    models = []
    for number, option in enumerate([[], ["--checkpoint", "100"]]):
        folder = tmp_path / str(number)
        code, output, error = ppo("export", tmp_path / "run", folder, *option)
        assert code == 0, error
        assert f"SavedModel after {(200, 100)[number]} steps" in output
        models.append(tf.saved_model.load(str(folder)))
    rows = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    newest, first = (model.mode(rows).numpy() for model in models)
    assert (newest != first).any()
    code, _, error = ppo("export", tmp_path / "run", "x", "--checkpoint", "7")
    assert code == 2
    assert "expected a checkpoint at 7 steps, found checkpoints at 100, 200;" in error
