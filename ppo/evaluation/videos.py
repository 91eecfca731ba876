"""Films of an agent that acts by the mode of its policy: a video per episode.

A video shows one episode and nothing else: the first frame its reset, the last one the
state that ended it. An env that does not render, or lacks what it draws with where it
runs, is an error that says what to do.
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
from ppo.run_folder.checkpoint import Which
from ppo.run_folder.folder import RunFolder

_MAX_LOST_IN_A_ROW = 20
_MAX_STEPS = 30_000  # a film of a quarter of an hour
_DEFAULT_FRAMES_PER_SECOND = 30.0
_REMEDIES = (
    ("pygame", "pip install 'envserve[video]' where the envs run"),
    (
        "mujoco|opengl|egl|osmesa|glfw",
        "where there is no screen MuJoCo draws by EGL or OSMesa: install libegl1 or "
        "libosmesa6 where the envs run, and set MUJOCO_GL=egl or MUJOCO_GL=osmesa "
        "there, for a server when it is started",
    ),
    ("", "the env has to support render_mode='rgb_array'"),
)


def rendering_env_maker(
    config: Config,
    addresses: Sequence[str] | None = None,
    import_modules: Sequence[str] | None = None,
) -> MakeEnv:
    """Return a function that starts or reaches envs which can be filmed.

    They are those of `env_maker`, except that they render, and that an ended episode
    stays at its end: else its last frame would be lost.
    """
    env_kwargs = {**config.env_kwargs, "render_mode": "rgb_array"}
    # Spares are other episodes, and reset in threads that may not draw.
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
                f"{config.env_name}: expected an env that takes "
                f"render_mode='rgb_array'; {_last_line(error)}."
            ) from error

    return make_rendering_env


def render_frame(env: BatchEnv) -> np.ndarray:
    """Return a frame of a batch's first env, uint8 `[height, width, 3]`.

    Raises:
        VideoError: it does not render, or cannot where it runs; says what to do.
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
            f"{env.spec.env_name}: expected render() to give a frame; "
            f"{_last_line(error)}; {next(remedies)}."
        ) from error
    is_array = isinstance(frame, np.ndarray)
    if not (is_array and frame.dtype == np.uint8 and frame.shape[2:] == (3,)):
        got = f"{frame.dtype}{list(frame.shape)}" if is_array else type(frame).__name__
        raise VideoError(
            f"{env.spec.env_name}: expected render() to give a frame, uint8 [height, "
            f"width, 3], got {got}; the env has to support render_mode='rgb_array'."
        )
    return frame


def frames_per_second(env: BatchEnv) -> float:
    """Return how fast films of the env should play, by its metadata; else 30."""
    try:
        metadata = env.get_attr("metadata")[0]
    except CallError:  # it holds more than plain values
        return _DEFAULT_FRAMES_PER_SECOND
    rate = metadata.get("render_fps") if isinstance(metadata, dict) else None
    if isinstance(rate, int | float) and 0.01 <= rate <= 1000.0:
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
    which: Which = None,
    seed: int | None = None,
    on_episode: Callable[[Path, Episode], None] = lambda path, episode: None,
) -> Evaluation:
    """Film complete episodes of the agent of a checkpoint.

    Writes `step-STEPS-episode-K.mp4` for K from 1, and `step-STEPS.json` with returns,
    lengths and videos, into a folder that is made if missing. An episode that lost a
    step is played again. The env, see `rendering_env_maker`, is closed at the end. By
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
    evaluation = Evaluation.of(played.values(), counters.steps)
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
        _show_in_tensorboard(next(iter(played)), events, counters.steps)
    return evaluation


def play_episode(
    env: BatchEnv, act: Callable[[Any], np.ndarray], show: Callable[[np.ndarray], None]
) -> Episode | None:
    """Play one episode in a batch of one env, and show every state that it was in.

    Args:
        env: does not reset itself, see `rendering_env_maker`.
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
        f"{env!r}: expected the episode to end within {_MAX_STEPS:,} steps; "
        f"{TIME_LIMIT_REMEDY}"
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
    events = tf.summary.create_file_writer(str(folder))
    with events.as_default(step=steps):
        tf.summary.write("evaluation/film", image, metadata=metadata)
    events.close()


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
