"""Record one video per episode of an agent.

A video contains exactly one episode: the first frame shows the state after the reset,
the last frame the final state.
"""

import itertools
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
from envserve.monitoring.video import VideoWriter, find_ffmpeg
from envserve.regular_file import open_no_link
from ppo.agent.agent import Agent
from ppo.agent.networks.recurrent import States
from ppo.algorithms.load import make_agent
from ppo.config.config import Config
from ppo.environments import MakeEnv
from ppo.errors import EnvDataError, EnvsLostError, OutputError
from ppo.evaluation.evaluate import (
    MAX_LOST_IN_A_ROW,
    TIME_LIMIT_REMEDY,
    Evaluation,
    evaluation_seed,
)
from ppo.evaluation.rendering import frames_per_second, render_frame
from ppo.in_graph_batch_env import check_finite
from ppo.rollout import Episode
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import CheckpointId
from ppo.run_folder.folder import RunFolder

_MAX_STEPS = 30_000  # about 17 minutes at 30 frames per second


def visualize_run(
    config: Config,
    run_folder: RunFolder,
    make_env: MakeEnv,
    outdir: Path,
    *,
    episodes: int,
    which: CheckpointId = None,
    seed: int | None = None,
    on_episode: Callable[[Path, Episode], None] = lambda path, episode: None,
) -> Evaluation:
    """Record complete episodes of a checkpoint's agent.

    An episode with a lost step is played again. The first video is also added to
    TensorBoard.

    Args:
      config: Settings of the run.
      run_folder: Folder with the checkpoints of the run.
      make_env: Creates the env, which is closed at the end; see
        `rendering_env_maker`.
      outdir: Folder for `step-STEPS-episode-K.mp4`, K from 1, and `step-STEPS.json`
        with returns, lengths and videos; created if it does not exist.
      episodes: Number of episodes.
      which: The checkpoint to load; by default, the newest.
      seed: Seed of the env; by default, the seed of the run's final evaluation. With
        the most likely actions, the videos then show the episodes of that
        evaluation's first env.
      on_episode: Called with the path and the episode of each complete video.

    Raises:
      CheckpointError: The checkpoint does not exist, or does not match the config.
      VideoError: The env does not render, or ffmpeg is not installed.
      OutputError: A file cannot be written.
      RunWriteError: TensorBoard's folder cannot be written.
      EnvDataError: An episode does not end.
      EnvsLostError: Too many consecutive episodes had a lost step.
    """
    # Raise errors before an env starts.
    find_ffmpeg()
    run_folder.check_folders("tensorboard")
    checkpoint.checkpoint_at(run_folder.checkpoints, which)
    seed = evaluation_seed(config.seed) if seed is None else seed
    played: dict[Path, Episode] = {}
    with make_env(num_envs=1, seed=seed) as env:
        agent = make_agent(env.observation_space, env.action_space, config)
        counters = checkpoint.load_agent(run_folder.checkpoints, agent, which)
        actor = _Actor(agent, env, config.evaluation_actions, seed)
        rate = frames_per_second(env)
        _make_folder(outdir)
        for number in range(1, episodes + 1):
            path = outdir / f"step-{counters.steps}-episode-{number}.mp4"
            played[path] = _record(path, env, actor, rate)
            on_episode(path, played[path])
    evaluation = Evaluation.from_episodes(played.values(), counters.steps)
    evaluation = evaluation._replace(actions=config.evaluation_actions)
    summary = {"env_name": config.env_name, "seed": seed, **evaluation.as_dict()}
    summary["lengths"] = evaluation.lengths.tolist()
    summary["videos"] = [path.name for path in played]
    path = outdir / f"step-{counters.steps}.json"
    try:
        with open(path, "w", encoding="utf-8", opener=open_no_link) as file:
            file.write(json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written; {error.strerror}.") from error
    with run_folder.writing():
        events = run_folder.path / "tensorboard"
        _add_to_tensorboard(next(iter(played)), events, counters.steps)
    return evaluation


def play_episode(
    env: BatchEnv,
    act: Callable[[Any], np.ndarray],
    on_frame: Callable[[np.ndarray], None],
) -> Episode | None:
    """Play and render one episode in a batch of one env.

    Args:
      env: Env without autoreset; see `rendering_env_maker`.
      act: Maps an observation `[1, ...]` to actions of the env.
      on_frame: Called with a frame, uint8 `[height, width, 3]`, after the reset and
        after each step.

    Returns:
      The episode, or None if a step was lost.

    Raises:
      VideoError: The env does not render.
      EnvDataError: The episode does not end.
    """
    observation = env.reset()
    on_frame(render_frame(env))
    total_reward = 0.0
    for length in range(1, _MAX_STEPS + 1):
        step = env.step(act(observation))
        if not step.valid[0]:
            return None
        total_reward += float(step.reward[0])
        on_frame(render_frame(env))
        if step.terminated[0] or step.truncated[0]:
            return Episode(0, total_reward, length)
        observation = step.observation
    raise EnvDataError(
        f"{env.spec.env_name}: expected the episode to end within {_MAX_STEPS:,} "
        f"steps; {TIME_LIMIT_REMEDY}"
    )


def _add_to_tensorboard(video: Path, folder: Path, steps: int) -> None:
    """Add the first 20 seconds of a video as a GIF, which TensorBoard can play."""
    # Without `eof_action`, ffmpeg drops all frames of a video shorter than 0.05 s.
    options = "-vf fps=10:eof_action=pass,scale=320:-2 -t 20 -f gif -"
    video = video.absolute()  # "10:30/a.mp4" would name a protocol
    command = [find_ffmpeg(), "-loglevel", "error", "-i", str(video), *options.split()]
    gif = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if gif.returncode:
        raise VideoError(f"{video}: expected a readable video; ffmpeg: {gif.stderr!r}.")
    width, height = struct.unpack("<HH", gif.stdout[6:10])
    image = [str(width).encode(), str(height).encode(), gif.stdout]
    images = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="images")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=images)
    events = tf.summary.create_file_writer(str(folder))
    with events.as_default(step=steps):
        tf.summary.write("evaluation/film", image, metadata=metadata)
    events.close()


def _record(path: Path, env: BatchEnv, actor: "_Actor", rate: float) -> Episode:
    """Record the next episode without lost steps, at `rate` frames per second."""
    for _ in range(MAX_LOST_IN_A_ROW):
        with VideoWriter(path, rate) as video:
            actor.start_episode()
            episode = play_episode(env, actor, video.add)
            if episode is not None:
                return episode
            video.discard()
    raise EnvsLostError(
        f"{env.spec.env_name}: expected a complete episode, but the last "
        f"{MAX_LOST_IN_A_ROW} were lost in a row; see the log for the reasons."
    )


class _Actor:
    """Maps observations of one env to its actions, and stores the recurrent state.

    Args:
      agent: The agent.
      env: The env, for error messages.
      actions: "mode" for the most likely actions, "sample" for sampled ones.
      seed: Seed of sampled actions, which differ in every step.
    """

    def __init__(self, agent: Agent, env: BatchEnv, actions: str, seed: int) -> None:
        choose = agent.act if actions == "sample" else agent.mode

        @tf.function
        def act(observation: Any, seed: tf.Tensor, *state: tf.Tensor) -> Any:
            action, _, *next_state = choose(observation, seed, *state)
            return agent.actions.to_env_action(action), next_state

        self._act, self._env = act, env
        self._seeds = zip(itertools.repeat(seed % 2**31), itertools.count())
        self._initial_state = States.zero(1, agent.policy_state_sizes).after

    def start_episode(self) -> None:
        """Reset the recurrent state."""
        self._state = self._initial_state

    def __call__(self, observation: Any) -> np.ndarray:
        check_finite(self._env, observation)
        tensors = tf.nest.map_structure(tf.constant, observation)
        seed = tf.constant(next(self._seeds))
        action, self._state = self._act(tensors, seed, *self._state)
        return np.asarray(action)


def _make_folder(outdir: Path) -> None:
    try:
        outdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{outdir}: cannot create the folder; {error.strerror}."
        ) from error
