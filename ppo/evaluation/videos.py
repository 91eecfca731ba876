"""Record one video per episode of an agent that takes its most likely actions.

A video contains exactly one episode: the first frame shows the reset, the last frame
the final state. If the env does not render, or a rendering library is missing on its
host, the error explains what to install or change.
"""

import json
import re
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from envserve.errors import CallError, EnvError, EnvStartError, VideoError
from envserve.monitoring.video import VideoWriter, find_ffmpeg
from ppo.agent.agent import Agent
from ppo.agent.networks.recurrent import States
from ppo.config.config import Config
from ppo.environments import MakeEnv, env_maker
from ppo.errors import EnvDataError, EnvsLostError, OutputError
from ppo.evaluation.evaluate import TIME_LIMIT_REMEDY, Evaluation, evaluation_seed
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.rollout import Episode
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import CheckpointId
from ppo.run_folder.folder import RunFolder

_MAX_LOST_IN_A_ROW = 20
_MAX_STEPS = 30_000  # about 17 minutes at 30 frames per second
_DEFAULT_FRAMES_PER_SECOND = 30.0
_REMEDIES = (
    ("pygame", "pip install 'envserve[video]' where the envs run"),
    (
        "mujoco|opengl|egl|osmesa|glfw",
        "without a display, MuJoCo renders with EGL or OSMesa: install libegl1 or "
        "libosmesa6 where the envs run, and set MUJOCO_GL=egl or MUJOCO_GL=osmesa "
        "there (for env servers, before they start)",
    ),
    ("", "the env must support render_mode='rgb_array'"),
)


def rendering_env_maker(
    config: Config,
    addresses: Sequence[str] | None = None,
    import_modules: Sequence[str] | None = None,
) -> MakeEnv:
    """Return a function that creates envs for recording.

    Unlike the envs of `env_maker`, they render, and they are not reset automatically,
    because a reset would discard the last frame of an episode.
    """
    env_kwargs = {**config.env_kwargs, "render_mode": "rgb_array"}
    # Spare envs reset in background threads, where rendering may not work.
    config = config.replace(env_kwargs=env_kwargs, spare_envs=False, num_splits=1)
    make_env = env_maker(config, addresses, 1, import_modules, autoreset="disabled")

    def make_rendering_env(
        *, num_envs: int, seed: int, is_training: bool = False
    ) -> BatchEnv:
        try:
            return make_env(num_envs=num_envs, seed=seed)
        except EnvStartError as error:
            if not error.remote_traceback or "render_mode" not in _last_line(error):
                raise
            raise VideoError(
                f"{config.env_name}: expected an env that accepts "
                f"render_mode='rgb_array'; {_last_line(error)}."
            ) from error

    return make_rendering_env


def render_frame(env: BatchEnv) -> np.ndarray:
    """Render a frame of the first env of a batch, uint8 `[height, width, 3]`.

    Raises:
        VideoError: rendering failed; the message contains the remedy.
    """
    try:
        frame = env.render(0)
    except CallError as error:
        remedies = (
            remedy
            for pattern, remedy in _REMEDIES
            if re.search(pattern, error.remote_traceback, re.IGNORECASE)
        )
        raise VideoError(
            f"{env.spec.env_name}: expected render() to return a frame; "
            f"{_last_line(error)}; {next(remedies)}."
        ) from error
    is_array = isinstance(frame, np.ndarray)
    if not (is_array and frame.dtype == np.uint8 and frame.shape[2:] == (3,)):
        got = f"{frame.dtype}{list(frame.shape)}" if is_array else type(frame).__name__
        raise VideoError(
            f"{env.spec.env_name}: expected render() to return a frame, uint8 [height, "
            f"width, 3], got {got}; the env must support render_mode='rgb_array'."
        )
    return frame


def frames_per_second(env: BatchEnv) -> float:
    """Return the frame rate in the env's metadata, or 30 if there is none."""
    try:
        metadata = env.get_attr("metadata")[0]
    except CallError:  # the metadata cannot be serialised
        return _DEFAULT_FRAMES_PER_SECOND
    rate = metadata.get("render_fps") if isinstance(metadata, dict) else None
    if isinstance(rate, int | float | np.number) and 0.01 <= rate <= 1000.0:
        return float(rate)
    return _DEFAULT_FRAMES_PER_SECOND


def _last_line(error: EnvError) -> str:
    lines = (error.remote_traceback or error.message).strip().splitlines()
    return lines[-1].rstrip(".")


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
    """Record complete episodes of the agent of a checkpoint.

    An episode with a lost step is played again. The first video is also added to
    TensorBoard.

    Args:
        config: settings of the run.
        run_folder: folder with the checkpoints of the run.
        make_env: creates the env, see `rendering_env_maker`; it is closed at the end.
        outdir: folder for `step-STEPS-episode-K.mp4`, K from 1, and `step-STEPS.json`
            with returns, lengths and videos; created if it does not exist.
        episodes: number of episodes.
        which: the checkpoint to load; by default, the newest.
        seed: seed of the env; by default, that of the run's final evaluation, so that
            the videos show the episodes of its first env.
        on_episode: called with the path and the episode of each complete video.

    Raises:
        CheckpointError: the checkpoint does not exist, or does not match the config.
        VideoError: the env does not render, or ffmpeg is not installed.
        OutputError: a file cannot be written.
        EnvDataError: an episode does not end.
        EnvsLostError: too many episodes were lost in a row.
    """
    find_ffmpeg()  # fail before an env starts
    checkpoint.checkpoint_at(run_folder.checkpoints, which)
    seed = evaluation_seed(config.seed) if seed is None else seed
    played: dict[Path, Episode] = {}
    with make_env(num_envs=1, seed=seed) as env:
        agent = Agent(env.observation_space, env.action_space, config)
        counters = checkpoint.load_agent(run_folder.checkpoints, agent, which)
        start_episode = _make_actor(agent, env)
        rate = frames_per_second(env)
        _make_folder(outdir)
        for number in range(1, episodes + 1):
            path = outdir / f"step-{counters.steps}-episode-{number}.mp4"
            played[path] = _record(path, env, start_episode, rate)
            on_episode(path, played[path])
    evaluation = Evaluation.from_episodes(played.values(), counters.steps)
    summary = {"env_name": config.env_name, "seed": seed, **evaluation.as_dict()}
    summary["lengths"] = evaluation.lengths.tolist()
    summary["videos"] = [path.name for path in played]
    path = outdir / f"step-{counters.steps}.json"
    try:
        path.write_text(json.dumps(summary, indent=2) + "\n")
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
        env: env without autoreset, see `rendering_env_maker`.
        act: maps an observation `[1, ...]` to actions of the env.
        on_frame: called with a frame, uint8 `[height, width, 3]`, after the reset and
            after each step.

    Returns:
        The episode, or None if a step was lost.

    Raises:
        VideoError: the env does not render.
        EnvDataError: the episode does not end.
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
        f"{env!r}: expected the episode to end within {_MAX_STEPS:,} steps; "
        f"{TIME_LIMIT_REMEDY}"
    )


def _add_to_tensorboard(video: Path, folder: Path, steps: int) -> None:
    """Add the first 20 seconds of a video as a GIF, which TensorBoard can play."""
    small = "-vf fps=10,scale=320:-2 -t 20 -f gif -"
    command = [find_ffmpeg(), "-loglevel", "error", "-i", str(video), *small.split()]
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


def _record(
    path: Path,
    env: BatchEnv,
    start_episode: Callable[[], Callable[[Any], np.ndarray]],
    rate: float,
) -> Episode:
    """Record the next complete episode."""
    for _ in range(_MAX_LOST_IN_A_ROW):
        with VideoWriter(path, rate) as video:
            episode = play_episode(env, start_episode(), video.add)
            if episode is not None:
                return episode
            video.discard()
    raise EnvsLostError(
        f"{env!r}: expected a complete episode, but the last {_MAX_LOST_IN_A_ROW} were "
        "lost in a row; see the log for the reasons."
    )


def _make_actor(
    agent: Agent, env: BatchEnv
) -> Callable[[], Callable[[Any], np.ndarray]]:
    """Return a function that starts an episode.

    The returned function creates a function that maps the observations of the episode
    to the most likely env actions, and keeps the agent's recurrent state.
    """
    graph_env = InGraphBatchEnv(env, agent.actions)

    @tf.function
    def act(observation: Any, *state: tf.Tensor) -> Any:
        action, _, *following = agent.mode(observation, tf.constant([0, 0]), *state)
        return graph_env.to_env_action(action), following

    def start_episode() -> Callable[[Any], np.ndarray]:
        state: Any = States.zero(1, agent.state_sizes[:1]).after

        def act_on_arrays(observation: Any) -> np.ndarray:
            nonlocal state
            graph_env.check_finite(observation, np.zeros(1))
            tensors = tf.nest.map_structure(tf.constant, observation)
            action, state = act(tensors, *state)
            return np.asarray(action)

        return act_on_arrays

    return start_episode


def _make_folder(outdir: Path) -> None:
    try:
        outdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{outdir}: cannot create the folder; {error.strerror}."
        ) from error
