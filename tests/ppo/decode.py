"""Reads what a video shows."""

import subprocess
from pathlib import Path

import numpy as np

from ppo.films.video import find_ffmpeg

__all__ = ["read_video"]


def read_video(path: Path, height: int, width: int) -> np.ndarray:
    """Decode all frames, uint8 `[N, height, width, 3]`."""
    command = [find_ffmpeg(), "-loglevel", "error", "-i", str(path)]
    decoded = subprocess.run(
        [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
        capture_output=True,
        check=True,
        timeout=110,
    )
    return np.frombuffer(decoded.stdout, np.uint8).reshape(-1, height, width, 3)
