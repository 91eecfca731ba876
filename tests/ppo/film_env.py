"""An env whose frames encode the episode and the step, with faults of real envs.

Importing this module registers it with Gymnasium.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from envserve.monitoring.video import find_ffmpeg

NAME = "ppo-tests/Film-v0"
MASKED = "ppo-tests/FilmMasked-v0"
WITHOUT_RENDER_MODE = "ppo-tests/WithoutRenderMode-v0"
WITHOUT_ARGUMENTS = "ppo-tests/WithoutArguments-v0"


class FilmEnv(gymnasium.Env[Any, Any]):
    """Env with random observations, `length` steps, and its actions as rewards.

    If the file `marker` exists at the third step, the env removes it and exits the
    process.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["rgb_array"],
        "render_fps": 12,
    }

    def __init__(
        self,
        length: int = 5,
        fault: str = "",
        marker: str = "",
        render_mode: str | None = None,
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float64)
        self.action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)
        self.render_mode = render_mode
        self._length = length
        self._fault = fault
        self._marker = Path(marker) if marker else None
        self._episode = -1
        self._step = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._episode += 1
        self._step = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        if self._step == 3 and self._marker is not None and self._marker.exists():
            self._marker.unlink()
            os._exit(1)
        is_over = self._step == self._length
        return self._observation(), float(action[0]), is_over, False, {}

    def render(self) -> Any:
        """Return a frame with an odd size, uint8 `[35, 49, 3]`."""
        if self._fault == "raise":
            raise RuntimeError("no canvas")
        if self._fault == "pygame":
            raise gymnasium.error.DependencyNotInstalled("pygame is not installed")
        if self._fault == "mujoco":
            raise RuntimeError("an OpenGL platform library has not been loaded")
        if self._fault == "none" or self.render_mode != "rgb_array":
            return None
        height = 35 + (self._fault == "grows") * self._step
        frame = np.empty((height, 49, 3), np.uint8)
        frame[...] = 40 * self._episode, 20 * self._step, 128
        return frame

    def _observation(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, 2)


class WithoutRenderMode(FilmEnv):
    """Env whose constructor does not accept render_mode."""

    def __init__(self) -> None:
        super().__init__()


class WithoutArguments(gymnasium.Env[Any, Any]):
    """Env without a constructor of its own."""

    observation_space = gymnasium.spaces.Box(-9.0, 9.0, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32)


class FilmMasked(FilmEnv):
    """Env with an image and an action mask; rewards are the first action, always 1."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        spaces = gymnasium.spaces
        self.observation_space = spaces.Dict(
            action_mask=spaces.MultiBinary(5),
            camera=spaces.Box(0, 255, (8, 8, 3), np.uint8),
        )
        self.action_space = spaces.MultiDiscrete([2, 3])

    def _observation(self) -> Any:
        camera = self.np_random.integers(0, 256, (8, 8, 3), np.uint8)
        return {"action_mask": np.array([0, 1, 1, 0, 1], np.int8), "camera": camera}


def read_frame(frame: np.ndarray) -> tuple[int, int]:
    """Return episode and step of a frame, even if it was compressed."""
    episode, step, _ = frame[:35, :49].reshape(-1, 3).mean(axis=0)
    return round(episode / 40), round(step / 20)


def read_video(path: Path, height: int, width: int) -> np.ndarray:
    """Decode all frames of a video, uint8 `[N, height, width, 3]`."""
    command = [find_ffmpeg(), "-loglevel", "error", "-i", str(path)]
    decoded = subprocess.run(
        [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
        capture_output=True,
        check=True,
    )
    return np.frombuffer(decoded.stdout, np.uint8).reshape(-1, height, width, 3)


gymnasium.register(NAME, f"{__name__}:{FilmEnv.__name__}")
gymnasium.register(WITHOUT_RENDER_MODE, f"{__name__}:{WithoutRenderMode.__name__}")
gymnasium.register(WITHOUT_ARGUMENTS, f"{__name__}:{WithoutArguments.__name__}")
gymnasium.register(MASKED, f"{__name__}:{FilmMasked.__name__}")
