"""Films of an agent that acts by the mode of its policy: a video per episode.

A video shows one episode and nothing else: the first frame its reset, the last one the
state that ended it.
"""

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from envserve.errors import VideoError
from envserve.video import VideoWriter, find_ffmpeg
from ppo.agent import Agent
from ppo.config import Config
from ppo.environments import MakeEnv
from ppo.errors import EnvDataError, EnvsLostError, OutputError
from ppo.evaluate import Evaluation, evaluation_seed
from ppo.films.rendering import frames_per_second, render_frame
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.networks.recurrent import States
from ppo.rollout import Episode
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import Which
from ppo.run_folder.folder import RunFolder

__all__ = ["play_episode", "visualize_run"]

_MAX_LOST_IN_A_ROW = 20
_MAX_STEPS = 100_000


def visualize_run(
    config: Config,
    run_folder: RunFolder,
    make_env: MakeEnv,
    outdir: Path,
    *,
    episodes: int,
    which: Which = None,
    seed: int | None = None,
    on_episode: Callable[[Path, Episode], None] = lambda path, episode: None,
) -> Evaluation:
    """Film complete episodes of the agent of a checkpoint.

    Writes `step-STEPS-episode-K.mp4` for K from 1, and `step-STEPS.json` with returns,
    lengths and videos, into a folder that is made if missing. An episode that lost a
    step is played again. The env, see `ppo.films.rendering`, is closed at the end. By
    default it has the seed of the run's evaluation, whose first env then plays the same
    episodes. TensorBoard shows the first one. `on_episode` is called with each video
    that is complete.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not fit the config.
        VideoError: the env does not render, or there is no ffmpeg.
        OutputError: a file cannot be written.
        EnvDataError: an episode does not end.
        EnvsLostError: the env fails again and again.
    """
    find_ffmpeg()  # sooner than an env starts
    checkpoint.checkpoint_at(run_folder.checkpoints, which)
    seed = evaluation_seed(config.seed) if seed is None else seed
    played: dict[Path, Episode] = {}
    with make_env(num_envs=1, seed=seed) as env:
        agent = Agent(env.observation_space, env.action_space, config)
        counters = checkpoint.load_agent(run_folder.checkpoints, agent, which)
        begin = _acting(agent, env)
        rate = frames_per_second(env)
        _make_folder(outdir)
        for number in range(1, episodes + 1):
            path = outdir / f"step-{counters.steps}-episode-{number}.mp4"
            played[path] = _film(path, env, begin, rate)
            on_episode(path, played[path])
    tensorboard = run_folder.path / "tensorboard"
    _show_in_tensorboard(next(iter(played)), tensorboard, counters.steps)
    evaluation = Evaluation.of(played.values(), counters.steps)
    summary = {"env_name": config.env_name, "seed": seed, **evaluation.as_dict()}
    summary["lengths"] = evaluation.lengths.tolist()
    summary["videos"] = [path.name for path in played]
    path = outdir / f"step-{counters.steps}.json"
    try:
        path.write_text(json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written; {error.strerror}.") from error
    return evaluation


def play_episode(
    env: BatchEnv, act: Callable[[Any], np.ndarray], show: Callable[[np.ndarray], None]
) -> Episode | None:
    """Play one episode in a batch of one env, and show every state that it was in.

    Args:
        env: does not reset itself, see `ppo.films.rendering`.
        act: maps an observation `[1, ...]` to actions of the env.
        show: called with a frame, uint8 `[height, width, 3]`, after the reset and after
            each step.

    Returns:
        The episode; None if a step of it was lost.

    Raises:
        VideoError: the env does not render.
        EnvDataError: the episode does not end.
    """
    observation = env.reset()
    show(render_frame(env))
    total_reward = 0.0
    for length in range(1, _MAX_STEPS + 1):
        step = env.step(act(observation))
        if not step.valid[0]:
            return None
        total_reward += float(step.reward[0])
        show(render_frame(env))
        if step.terminated[0] or step.truncated[0]:
            return Episode(0, total_reward, length)
        observation = step.observation
    raise EnvDataError(
        f"{env!r}: expected the episode to end within {_MAX_STEPS:,} steps; give the "
        "env a time limit."
    )


def _show_in_tensorboard(film: Path, folder: Path, steps: int) -> None:
    """Add the first 20 seconds of a film as a GIF, which TensorBoard can play."""
    small = "-vf fps=10,scale=320:-2 -t 20 -f gif -"
    command = [find_ffmpeg(), "-loglevel", "error", "-i", str(film), *small.split()]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if made.returncode:
        raise VideoError(f"{film}: expected a film that ffmpeg reads; {made.stderr!r}.")
    width, height = struct.unpack("<HH", made.stdout[6:10])
    image = [str(width).encode(), str(height).encode(), made.stdout]
    images = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="images")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=images)
    with tf.summary.create_file_writer(str(folder)).as_default(step=steps):
        tf.summary.write("evaluation/film", image, metadata=metadata)


def _film(
    path: Path,
    env: BatchEnv,
    begin: Callable[[], Callable[[Any], np.ndarray]],
    rate: float,
) -> Episode:
    """Write the video of the next episode that is complete."""
    for _ in range(_MAX_LOST_IN_A_ROW):
        with VideoWriter(path, rate) as video:
            episode = play_episode(env, begin(), video.add)
            if episode is not None:
                return episode
            video.discard()
    raise EnvsLostError(
        f"{env!r}: expected a complete episode, but the last {_MAX_LOST_IN_A_ROW} were "
        "lost in a row; see the log for why it fails."
    )


def _acting(agent: Agent, env: BatchEnv) -> Callable[[], Callable[[Any], np.ndarray]]:
    """Return a function to call when an episode begins.

    It gives one from the episode's observations to the most likely actions, for the
    env, which remembers what the agent does.
    """
    graph_env = InGraphBatchEnv(env, agent.actions)

    @tf.function
    def act(observation: Any, *state: tf.Tensor) -> Any:
        action, _, *following = agent.mode(observation, tf.constant([0, 0]), *state)
        return graph_env.to_env_action(action), following

    def begin() -> Callable[[Any], np.ndarray]:
        state: Any = States.zero(1, agent.state_sizes[:1]).after

        def act_on_arrays(observation: Any) -> np.ndarray:
            nonlocal state
            graph_env.check_finite(observation, np.zeros(1))
            tensors = tf.nest.map_structure(tf.constant, observation)
            action, state = act(tensors, *state)
            return np.asarray(action)

        return act_on_arrays

    return begin


def _make_folder(outdir: Path) -> None:
    try:
        outdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{outdir}: expected a folder that can be created; {error.strerror}."
        ) from error
