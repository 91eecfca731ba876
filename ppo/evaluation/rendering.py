"""Create envs that render, and return their frames. TensorFlow is not imported.

If the env does not render, or a rendering library is missing on its host, the error
explains what to install or change.
"""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

from envserve.client import BatchEnv
from envserve.envs.user_envs import module_of
from envserve.errors import CallError, EnvError, EnvStartError, VideoError
from envserve.monitoring.video import find_ffmpeg
from envserve.text import install_command
from envserve.worker import rendering
from ppo.config.config import Config
from ppo.environments import MakeEnv, env_maker

#: Modules of Gymnasium whose envs render with pygame.
_PYGAME_MODULES = tuple(
    f"gymnasium.envs.{name}" for name in ("box2d", "classic_control", "toy_text")
)
#: Patterns in the traceback of a failed rendering, with remedies; the first match
#: applies.
_REMEDIES = (
    ("pygame", f"{install_command('video')} on the host that runs the envs"),
    (
        "mujoco|opengl|egl|osmesa|glfw",
        "without a display, MuJoCo renders with EGL or OSMesa: install libegl1 or "
        "libosmesa6 on the host that runs the envs, and set MUJOCO_GL=egl or "
        "MUJOCO_GL=osmesa there (for env servers, before they start)",
    ),
    ("", "the env must support render_mode='rgb_array'"),
)


def prepare_filming(config: Config, addresses: Sequence[str]) -> None:
    """Check the packages that videos need; render off-screen if there is no display.

    Raises:
      VideoError: Ffmpeg or pygame is missing; the message contains the remedy.
    """
    find_ffmpeg()
    uses_pygame = module_of(config.env_name).startswith(_PYGAME_MODULES)
    if uses_pygame and not addresses and find_spec("pygame") is None:
        raise VideoError(f"{config.env_name} renders with pygame; {_REMEDIES[0][1]}.")
    # Workers inherit these variables, so they can render without a display.
    os.environ.update(rendering.headless_variables(os.environ))


def rendering_env_maker(
    config: Config,
    addresses: Sequence[str] | None = None,
    import_modules: Sequence[str] | None = None,
) -> MakeEnv:
    """Return a function that creates envs for recording.

    Unlike the envs of `env_maker`, these envs render, and are not reset automatically,
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
            text = _last_line(error)
            is_rejected = (
                "keyword argument 'render_mode'" in text
                or "takes no arguments, got render_mode" in text
                or (error.remote_traceback and "render_mode" in text)
            )
            if not is_rejected:  # by the env; a server may not allow the argument
                raise
            raise VideoError(
                f"{config.env_name}: expected an env that accepts "
                f"render_mode='rgb_array'; {text}."
            ) from error

    return make_rendering_env


def render_frame(env: BatchEnv) -> np.ndarray:
    """Render a frame of the first env of a batch, uint8 `[height, width, 3]`.

    Raises:
      VideoError: Rendering failed; the message contains the remedy.
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
        return rendering.frame_rate(env.get_attr("metadata")[0])
    except CallError:  # the metadata cannot be serialised
        return rendering.frame_rate(None)


def _last_line(error: EnvError) -> str:
    lines = (error.remote_traceback or error.message).strip().splitlines()
    return lines[-1].rstrip(".")
