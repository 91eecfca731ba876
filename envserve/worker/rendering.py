"""Pictures of the envs that somebody looks at, made between two steps.

They take a sixtieth of the worker's time, as measured, whatever an env draws, however
many look. A render belongs to the env: what it raises is shown in place of a picture,
and one that hangs is seen as the next step that does.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, Protocol

import numpy as np

from envserve.crashes.action_ring import ActionRing
from envserve.lane import MAX_JPEG_BYTES, MAX_TEXT, RenderedFrame
from envserve.slab import next_beat
from envserve.text import without_folders
from envserve.worker.frame_board import FrameBoard

__all__ = ["FrameRenderer", "encode_jpeg", "headless_settings", "render"]

#: For so many times as long as it took there is no other picture. What is loaded for a
#: row's first one is spread, but counts no more than that.
_REST: Final = 59
_MOST_FIRST_NS: Final = 1_000_000_000
#: How many processes of a worker may end in a render before there is no other.
_MAX_ENDED: Final = 2
_QUALITIES: Final = (75, 50, 25)
#: In texts for terminals.
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class _Block(Protocol):
    rows: range

    def render(self, row: int) -> Any: ...


class FrameRenderer:
    """Render the watched rows of a worker to the board, one row at a time.

    Attributes:
      until: `until` of the board; its only number is 0 while no row is watched.
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
        self.until = board.until
        self._worker = worker
        self._heartbeat = heartbeat
        self._ring = ring
        self._blocks = {row: block for block in blocks for row in block.rows}
        self._shown_at = dict.fromkeys(self._blocks, 0)
        self._rests_until = 0

    def render_due_row(self) -> None:
        """Shows the row that was not shown for longest, if it is time to."""
        begin, is_first = time.monotonic_ns(), False
        if begin < self._rests_until:
            return
        if begin > self.until[0]:
            self.until[0] = 0
        wanted = enumerate(self._board.wanted.tolist())
        due = [
            (self._shown_at[row], row, slot, width)
            for slot, (row, until, width) in wanted
            if until > begin and row in self._shown_at
        ]
        if due:
            shown_at, row, slot, width = min(due)
            is_first, self._shown_at[row] = not shown_at, begin
            jpeg, text = self._picture(row, width)
            seed, steps = self._ring.glance(row)
            known: Any = {"row": row, "seed": seed, "episode_steps": steps}
            picture = RenderedFrame(
                serial=begin, jpeg=jpeg, text=text[:MAX_TEXT], **known
            )
            self._board.write(slot, picture)
        end = time.monotonic_ns()
        rest = _REST * (end - begin)
        self._rests_until = end + (min(rest, _MOST_FIRST_NS) if is_first else rest)

    def _picture(self, row: int, width: int) -> tuple[bytes, str]:
        """Renders a row: a picture, or what there is to say instead."""
        ended, worker = self._board.ended, self._worker
        if ended[worker] >= _MAX_ENDED:
            return b"", f"no picture: render has ended its worker {_MAX_ENDED} times"
        self._heartbeat[0] = next_beat(self._heartbeat[0], row)
        ended[worker] += 1
        try:
            frame = self._blocks[row].render(row)
            jpeg = encode_jpeg(frame, width)
        except Exception as error:
            name = type(error).__name__
            frame, jpeg = without_folders(f"render raised {name}: {error}"), b""
        ended[worker] = 0 if jpeg else ended[worker] - 1
        if jpeg or isinstance(frame, str):
            return jpeg, "" if jpeg else _COLOURS.sub("", frame)
        what = "nothing" if frame is None else type(frame).__name__
        if isinstance(frame, np.ndarray):
            what = f"{frame.dtype}{[*frame.shape]}"
        return b"", f"no picture: expected render to give uint8[h, w, 3]; got {what}"


def render(env: Any) -> Any:
    """Returns what an env renders, even if it was built without a render mode."""
    _do_without_a_screen()
    inner = env.unwrapped
    if str(getattr(env, "render_mode", None)).endswith("_list"):
        env = inner  # whose wrapper keeps frames for others
    modes = getattr(inner, "metadata", {}).get("render_modes", ())
    if getattr(inner, "render_mode", None) is not None or "rgb_array" not in modes:
        return env.render()
    inner.render_mode = "rgb_array"  # envs look at it when they are asked to draw
    try:
        return env.render()
    finally:
        inner.render_mode = None


@cache
def _do_without_a_screen() -> None:
    """Has GLFW not be asked for one: where there is none, it ends the process."""
    os.environ.update(headless_settings(os.environ))


def encode_jpeg(frame: Any, width: int) -> bytes:
    """Returns a JPEG at most so many pixels across; empty for what is no picture.

    Args:
      frame: What an env renders: uint8 `[height, width, 3]`; of a list, the last.
      width: Pixels; narrower pictures stay as they are.
    """
    if isinstance(frame, list) and frame:
        frame = frame[-1]
    is_picture = isinstance(frame, np.ndarray) and frame.dtype == np.uint8
    if not is_picture or frame.ndim < 2 or frame.shape[2:] not in ((), (3,), (4,)):
        return b""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "pictures need Pillow; pip install 'envserve[page]' where the envs run"
        ) from error
    image = Image.fromarray(frame)
    image = image if image.mode == "RGB" else image.convert("RGB")
    # Four times as fast as Pillow's default, which is for pictures to be kept.
    image.thumbnail((width, 2 * width), Image.Resampling.BILINEAR, reducing_gap=1.0)
    while True:
        for quality in _QUALITIES:
            file = io.BytesIO()
            image.save(file, "jpeg", quality=quality)
            if file.tell() <= MAX_JPEG_BYTES:
                return file.getvalue()
        image = image.reduce(2)


def headless_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what to set on a Linux without a screen, given a process's variables.

    MuJoCo draws by EGL or OSMesa, whichever is there; pygame must look for no screen.
    """
    if sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(environment):
        return {}
    settings = {"SDL_VIDEODRIVER": "dummy"}
    for library, backend in (("OSMesa", "osmesa"), ("EGL", "egl")):
        with contextlib.suppress(OSError):  # it needs a temporary folder
            if ctypes.util.find_library(library):
                settings["MUJOCO_GL"] = backend
    return {key: settings[key] for key in settings if key not in environment}
