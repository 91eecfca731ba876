"""Render watched envs between a worker's operations.

Rendering takes about one sixtieth of a worker's time, however slowly an env renders and
however many clients watch, because the pause after a frame is proportional to its
rendering time. If the env's `render` raises an exception, its message is shown instead
of the frame. A hang is detected like a hang of the next step.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import io
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, Protocol

import numpy as np

from envserve.crashes.action_ring import ActionRing
from envserve.lane import MAX_JPEG_BYTES, MAX_TEXT, RenderedFrame
from envserve.slab import next_beat
from envserve.text import install_command, message_of, without_folders
from envserve.worker import unpatched
from envserve.worker.frame_board import FrameBoard

#: The pause after a frame, as a multiple of its rendering time. Rendering the first
#: frame of a row also loads libraries, so the pause after it has an upper limit.
_PAUSE_FACTOR: Final = 59
_MAX_FIRST_PAUSE_NS: Final = 1_000_000_000
#: A worker stops rendering after this number of its processes have exited while they
#: rendered.
_MAX_RENDER_CRASHES: Final = 2
_QUALITIES: Final = (75, 50, 25)
#: Colour codes in frames that are rendered as text for terminals.
_ANSI_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class _Block(Protocol):
    rows: range

    def render(self, row: int) -> Any: ...


class FrameRenderer:
    """Renders the watched rows of a worker to the frame board, one row at a time.

    Attributes:
      watched_until: See `FrameBoard`.
    """

    def __init__(
        self,
        board: FrameBoard,
        worker: int,
        heartbeat: memoryview,
        ring: ActionRing,
        blocks: Iterable[_Block],
    ) -> None:
        self._board = board
        self.watched_until = board.watched_until
        self._worker = worker
        self._heartbeat = heartbeat
        self._ring = ring
        self._blocks = {row: block for block in blocks for row in block.rows}
        self._rendered_at = dict.fromkeys(self._blocks, 0)
        self._pause_until = 0

    def render_due_row(self) -> None:
        """Render the watched row with the oldest frame, unless rendering is paused."""
        started_at, is_first = unpatched.monotonic_ns(), False
        if started_at < self._pause_until:
            return
        if started_at > self.watched_until[0]:
            self.watched_until[0] = 0
        watched = enumerate(self._board.watched.tolist())
        due = [
            (self._rendered_at[row], row, slot, width)
            for slot, (row, until, width) in watched
            if until > started_at and row in self._rendered_at
        ]
        if due:
            rendered_at, row, slot, width = min(due)
            is_first, self._rendered_at[row] = not rendered_at, started_at
            jpeg, text = self._render_jpeg(row, width)
            seed, steps = self._ring.seed_and_steps(row)
            frame = RenderedFrame(
                row=row,
                serial=started_at,
                jpeg=jpeg,
                text=text[:MAX_TEXT],
                seed=seed,
                episode_steps=steps,
            )
            self._board.write(slot, frame)
        end = unpatched.monotonic_ns()
        pause = _PAUSE_FACTOR * (end - started_at)
        if is_first:
            pause = min(pause, _MAX_FIRST_PAUSE_NS)
        self._pause_until = end + pause

    def _render_jpeg(self, row: int, width: int) -> tuple[bytes, str]:
        """Render a row; return a JPEG and "", or b"" and the text to show instead."""
        crashes, worker = self._board.num_render_crashes, self._worker
        if crashes[worker] >= _MAX_RENDER_CRASHES:
            times = f"{_MAX_RENDER_CRASHES} times"
            return b"", f"no image: render() crashed or hung {times}"
        self._heartbeat[0] = next_beat(self._heartbeat[0], row)
        crashes[worker] += 1
        try:
            frame = self._blocks[row].render(row)
            jpeg = encode_jpeg(frame, width)
        except Exception as error:
            text = f"render() raised {type(error).__name__}: {message_of(error)}"
            frame, jpeg = without_folders(text), b""
        crashes[worker] = 0 if jpeg else crashes[worker] - 1
        if jpeg or isinstance(frame, str):
            return jpeg, "" if jpeg else _ANSI_COLOURS.sub("", frame)
        returned = "None" if frame is None else type(frame).__name__
        if isinstance(frame, np.ndarray):
            returned = f"{frame.dtype}{[*frame.shape]}"
        expected = "expected render() to return uint8[h, w, 3]"
        return b"", f"no image: {expected}; got {returned}"


def render(env: Any) -> Any:
    """Return an env's rendered frame, even if it was built without a render mode."""
    _configure_headless()
    inner = getattr(env, "unwrapped", env)  # not all envs derive from gymnasium.Env
    if str(getattr(inner, "render_mode", None)).endswith("_list"):
        # `render` would return and remove the frames that the env's user wants.
        return "no image: the env collects its frames itself"
    if str(getattr(env, "render_mode", None)).endswith("_list"):
        env = inner  # Gymnasium's wrapper would add this frame to its list
    modes = (getattr(inner, "metadata", None) or {}).get("render_modes", ())
    if getattr(inner, "render_mode", None) is not None or "rgb_array" not in modes:
        return env.render()
    inner.render_mode = "rgb_array"  # most envs read it only when they render
    try:
        return env.render()
    finally:
        inner.render_mode = None


def frame_rate(metadata: Any) -> float:
    """Return the frames per second in an env's metadata, or 30 if there are none."""
    rate = metadata.get("render_fps") if isinstance(metadata, Mapping) else None
    if isinstance(rate, int | float | np.number) and 0.01 <= rate <= 1000.0:
        return float(rate)
    return 30.0


def prepare_rendering(env_kwargs: Mapping[str, Any]) -> None:
    """If an env is built to render images, choose a renderer that needs no display."""
    if env_kwargs.get("render_mode") not in (None, "human"):
        _configure_headless()


@cache
def _configure_headless() -> None:
    """Set `headless_variables`, because GLFW ends a process that has no display."""
    os.environ.update(headless_variables(os.environ))


def encode_jpeg(frame: Any, width: int) -> bytes:
    """Encode a frame as JPEG; return b"" if it is not an image.

    Args:
      frame: uint8 `[height, width, 3]`. Greyscale and RGBA frames are also accepted. If
        a list of frames is given, the last frame is encoded.
      width: Maximum width in pixels; narrower frames are not scaled.
    """
    if isinstance(frame, list) and frame:
        frame = frame[-1]
    is_image = isinstance(frame, np.ndarray) and frame.dtype == np.uint8
    if not is_image or frame.ndim < 2 or frame.shape[2:] not in ((), (3,), (4,)):
        return b""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"frames require Pillow; run {install_command('page')} on the host that "
            "runs the envs"
        ) from error
    image = Image.fromarray(frame)
    image = image if image.mode == "RGB" else image.convert("RGB")
    # BILINEAR is four times as fast as Pillow's default, and its quality is sufficient.
    image.thumbnail((width, 2 * width), Image.Resampling.BILINEAR, reducing_gap=1.0)
    while True:
        for quality in _QUALITIES:
            file = io.BytesIO()
            image.save(file, "jpeg", quality=quality)
            if file.tell() <= MAX_JPEG_BYTES:
                return file.getvalue()
        image = image.reduce(2)


def headless_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to set on Linux if there is no display.

    With these variables, MuJoCo uses EGL or OSMesa, and pygame opens no window. Those
    that the environment already contains are omitted.
    """
    if sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(environment):
        return {}
    settings = {"SDL_VIDEODRIVER": "dummy"}
    for library, backend in (("OSMesa", "osmesa"), ("EGL", "egl")):
        with contextlib.suppress(OSError):  # there is no writable temporary folder
            if ctypes.util.find_library(library):
                settings["MUJOCO_GL"] = backend
    return {key: settings[key] for key in settings if key not in environment}
