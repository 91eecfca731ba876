"""Export a policy as a SavedModel that maps raw observations to env actions.

Loading the SavedModel needs only TensorFlow. Observations have the structure of the
observation space, with any number of rows. Normalisation is part of the model.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.algorithms.load import make_agent
from ppo.config.config import Config
from ppo.environments import MakeEnv
from ppo.errors import OutputError, UnsupportedSpaceError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import CheckpointId, Counters
from ppo.run_folder.folder import RunFolder, check_utf8, reason_of


def export_run(
    config: Config,
    run_folder: RunFolder,
    make_env: MakeEnv,
    folder: Path,
    *,
    which: CheckpointId = None,
) -> Counters:
    """Export the policy of a checkpoint.

    Create one env to read its spaces, and close it at the end.

    Returns:
      The counters of the checkpoint: iteration and env steps.

    Raises:
      CheckpointError: The checkpoint does not exist, or does not match the config.
      OutputError: The folder is not empty, or cannot be written.
    """
    _check_unused(folder)
    # Raise an error for a missing checkpoint before an env starts.
    checkpoint.checkpoint_at(run_folder.checkpoints, which)
    with make_env(num_envs=1, seed=config.seed) as env:
        agent = make_agent(env.observation_space, env.action_space, config)
        counters = checkpoint.load_agent(run_folder.checkpoints, agent, which)
        export_policy(agent, InGraphBatchEnv(env, agent.actions), folder)
    return counters


def export_policy(agent: Agent, env: InGraphBatchEnv, folder: Path) -> None:
    """Write the agent's policy as a SavedModel.

    The loaded model has two functions. Observations have the structure of the
    observation space, with rows `[N, ...]`; actions are rows `[N, ...]` that the env
    accepts:

    *   `mode(observation)`: return the most likely actions.
    *   `sample(observation, seed)`: sample actions; the same seed (int32 pair) always
        returns the same actions.

    The signatures `serving_default` and `sample` are the same functions with flat
    inputs, `observation` or `observation_KEY`, and the output `action`.

    A recurrent policy also has a state per row, float32 `[N, units]`, which is zero at
    the start of an episode. If the agent has several states, this is their
    concatenation:

    *   `initial_state(num_rows)`: return zero states.
    *   `mode(observation, state)` and `sample(observation, state, seed)`: return the
        actions and the state for the next observation. The signatures also have an
        input and an output `state`.

    Args:
      agent: Agent to export, with its normalisation statistics.
      env: Env with the spaces of the agent's task.
      folder: New or empty folder.

    Raises:
      OutputError: The folder is not empty, or cannot be written.
    """
    _check_unused(folder)
    model, signatures = _build_model(agent, env)
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        if partial.is_symlink():  # in a stranger's run, to any folder
            partial.unlink()
        shutil.rmtree(partial, ignore_errors=True)
        tf.saved_model.save(model, str(partial), signatures=signatures)
        partial.rename(folder)
    except (OSError, tf.errors.OpError) as error:
        raise OutputError(f"{folder}: expected a writable folder; {error}.") from error


def _build_model(
    agent: Agent, env: InGraphBatchEnv
) -> tuple[tf.Module, dict[str, Any]]:
    """Return the module to save, and its signatures."""
    mode, sample = _policy_functions(agent, env)
    inputs = [_input_specs(env.observation_spec)]
    model = tf.Module()
    if agent.policy_state_sizes:
        size = sum(agent.policy_state_sizes)
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
    # TensorFlow saves only variables that are attributes of the module.
    model.used_variables = [
        variable
        for signature in signatures.values()
        for variable in signature.graph.variables
    ]
    return model, signatures


def _policy_functions(agent: Agent, env: InGraphBatchEnv) -> tuple[Any, Any]:
    """Return the functions `mode` and `sample` that `export_policy` describes."""
    sizes = agent.policy_state_sizes

    def act(choose: Any, observation: Any, seed: Any, state: Any = None) -> Any:
        states = tf.split(state, sizes, axis=1) if sizes else []
        action, _, *states_after = choose(observation, seed, *states)
        action = env.to_env_action(action)
        return (action, tf.concat(states_after, axis=1)) if sizes else action

    no_seed = (0, 0)
    if sizes:
        return (
            lambda observation, state: act(agent.mode, observation, no_seed, state),
            lambda observation, state, seed: act(agent.act, observation, seed, state),
        )
    return (
        lambda observation: act(agent.mode, observation, no_seed),
        lambda observation, seed: act(agent.act, observation, seed),
    )


def _with_named_outputs(function: Any, specs: list[Any]) -> Any:
    """Trace a function as a signature, which returns a dict of tensors."""

    def named(*inputs: Any) -> dict[str, tf.Tensor]:
        outputs = function(*inputs)
        if not isinstance(outputs, tuple):
            return {"action": outputs}
        return dict(zip(("action", "state"), outputs, strict=True))

    return tf.function(named, input_signature=specs).get_concrete_function()


def _input_specs(specs: Any) -> Any:
    """Return specs with a variable number of rows, and a unique name for each leaf."""
    used_names: set[str] = set()

    def named(part: Any, path: str) -> Any:
        if isinstance(part, dict):
            if invalid := [key for key in part if not isinstance(key, str)]:
                raise UnsupportedSpaceError(
                    f"Observation space: expected string keys, because a SavedModel "
                    f"requires them, got {invalid[0]!r}; rename the key in a wrapper."
                )
            return {key: named(part[key], f"{path}_{key}") for key in part}
        if isinstance(part, tuple):
            return tuple(named(item, f"{path}_{i}") for i, item in enumerate(part))
        name = re.sub(r"[^A-Za-z0-9_]", "_", path)
        while name in used_names:
            name += "_"
        used_names.add(name)
        return tf.TensorSpec([None, *part.shape[1:]], part.dtype, name)

    return named(specs, "observation")


def _check_unused(folder: Path) -> None:
    try:
        check_utf8(folder)
        is_used = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except (OSError, UnicodeEncodeError) as error:
        raise OutputError(
            f"{folder}: expected a new or empty folder; {reason_of(error)}."
        ) from error
    if is_used or not folder.name:
        raise OutputError(
            f"{folder}: expected a new or empty folder, not a file, a folder with "
            "files, or the working directory; choose another folder."
        )
