"""A policy as a SavedModel: raw observations in, the env's own actions out.

Loading it takes TensorFlow and nothing of this project. Observations are structured as
the observation space, with any number of rows, and the normaliser is inside.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.config.config import Config
from ppo.environments import MakeEnv
from ppo.errors import OutputError, UnsupportedSpaceError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import Counters, Which
from ppo.run_folder.folder import RunFolder


def export_run(
    config: Config,
    run_folder: RunFolder,
    make_env: MakeEnv,
    folder: Path,
    *,
    which: Which = None,
) -> Counters:
    """Export the policy of a run's checkpoint; returns how far it had come.

    One env is made for its spaces, and closed at the end.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not fit the config.
        OutputError: the folder is taken, or cannot be written.
    """
    _check_free(folder)
    checkpoint.checkpoint_at(run_folder.checkpoints, which)  # sooner than an env starts
    with make_env(num_envs=1, seed=config.seed) as env:
        agent = Agent(env.observation_space, env.action_space, config)
        counters = checkpoint.load_agent(run_folder.checkpoints, agent, which)
        export_policy(agent, InGraphBatchEnv(env, agent.actions), folder)
    return counters


def export_policy(agent: Agent, env: InGraphBatchEnv, folder: Path) -> None:
    """Write the agent's policy as a SavedModel.

    What is loaded from it has two functions, whose observations are rows `[N, ...]`,
    structured as the space, and whose actions are rows `[N, ...]` that the env takes:

    *   `mode(observation)`: the most likely actions.
    *   `sample(observation, seed)`: drawn ones; the same seed (int32 pair) gives the
        same actions.

    The signatures `serving_default` and `sample` are the same two with flat inputs,
    `observation` or `observation_KEY`, and the output `action`.

    A recurrent policy is told what it remembers, and tells it: a state per row, float32
    `[N, units]`, which is zero where an episode begins. There are then

    *   `initial_state(num_rows)`: zeros for so many rows.
    *   `mode(observation, state)` and `sample(observation, state, seed)`: actions, and
        the state for the next observation. Both signatures call it `state`, too.

    The statistics of the agent's observations are included. The env has the same
    task's spaces; the folder is new or empty.

    Raises:
        OutputError: the folder is taken, or cannot be written.
    """
    _check_free(folder)
    model, signatures = _model(agent, env)
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        tf.saved_model.save(model, str(partial), signatures=signatures)
        partial.rename(folder)
    except (OSError, tf.errors.OpError) as error:
        raise OutputError(
            f"{folder}: expected a folder that can be written; {error}."
        ) from error


def _model(agent: Agent, env: InGraphBatchEnv) -> tuple[tf.Module, dict[str, Any]]:
    """Return what is saved, and its signatures."""
    mode, sample = _functions(agent, env)
    inputs = [_named_inputs(env.observation_spec)]
    model = tf.Module()
    if agent.state_sizes:
        size = agent.state_sizes[0]  # nobody asks for values, and for their memory
        inputs.append(tf.TensorSpec([None, size], tf.float32, "state"))
        model.initial_state = tf.function(
            lambda num_rows: tf.zeros([num_rows, size]),
            input_signature=[tf.TensorSpec([], tf.int32, "num_rows")],
        )
    seed = tf.TensorSpec([2], tf.int32, "seed")
    signatures = {
        "serving_default": _with_named_outputs(mode, inputs),
        "sample": _with_named_outputs(sample, [*inputs, seed]),
    }
    model.mode = tf.function(mode, input_signature=inputs)
    model.sample = tf.function(sample, input_signature=[*inputs, seed])
    # Only what is found in an attribute is saved, also of what the functions read.
    model.used_variables = [
        variable
        for signature in signatures.values()
        for variable in signature.graph.variables
    ]
    return model, signatures


def _functions(agent: Agent, env: InGraphBatchEnv) -> tuple[Any, Any]:
    """Return `mode` and `sample`; those of a recurrent policy have a state."""

    def act(choose: Any, observation: Any, seed: Any, *state: tf.Tensor) -> Any:
        action, _, *state_after = choose(observation, seed, *state)
        action = env.to_env_action(action)
        return (action, *state_after) if state else action

    no_seed = (0, 0)
    if agent.state_sizes:
        return (
            lambda observation, state: act(agent.mode, observation, no_seed, state),
            lambda observation, state, seed: act(agent.act, observation, seed, state),
        )
    return (
        lambda observation: act(agent.mode, observation, no_seed),
        lambda observation, seed: act(agent.act, observation, seed),
    )


def _with_named_outputs(function: Any, specs: list[Any]) -> Any:
    """Trace a function for a signature, which gives tensors by name."""

    def named(*inputs: Any) -> dict[str, tf.Tensor]:
        outputs = function(*inputs)
        if not isinstance(outputs, tuple):
            return {"action": outputs}
        return dict(zip(("action", "state"), outputs, strict=True))

    return tf.function(named, input_signature=specs).get_concrete_function()


def _named_inputs(specs: Any) -> Any:
    """Give each leaf any number of rows, and a name of its own."""
    taken: set[str] = set()

    def named(part: Any, path: str) -> Any:
        if isinstance(part, dict):
            if odd := [key for key in part if not isinstance(key, str)]:
                raise UnsupportedSpaceError(
                    f"Observation space: expected texts as keys, which is all that a "
                    f"SavedModel takes, got {odd[0]!r}; rename it by a wrapper."
                )
            return {key: named(part[key], f"{path}_{key}") for key in part}
        if isinstance(part, tuple):
            return tuple(named(item, f"{path}_{i}") for i, item in enumerate(part))
        name = re.sub(r"[^A-Za-z0-9_]", "_", path)
        while name in taken:
            name += "_"
        taken.add(name)
        return tf.TensorSpec([None, *part.shape[1:]], part.dtype, name)

    return named(specs, "observation")


def _check_free(folder: Path) -> None:
    is_taken = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    if is_taken or not folder.name:
        raise OutputError(
            f"{folder}: expected a new or empty folder, got one with files in it, a "
            "file, or this one; choose another."
        )
