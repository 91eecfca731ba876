"""Envs that can be filmed, and their frames.

An env may not render at all, or lack what it draws with where it runs: each of these
is an error that says what to do.
"""

import re
from collections.abc import Sequence

import numpy as np

from envserve.client import BatchEnv
from envserve.errors import CallError, EnvError, EnvStartError, VideoError
from ppo.config import Config
from ppo.environments import MakeEnv, env_maker

__all__ = ["frames_per_second", "render_frame", "rendering_env_maker"]

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
