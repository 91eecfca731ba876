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
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from envserve.crashes.action_ring import ActionRing, ring_nbytes
from envserve.lane import MAX_JPEG_BYTES, MAX_TEXT, Picture
from envserve.slab import Slab, next_beat
from envserve.spaces.env_spec import EnvSpec
from envserve.text import without_folders
from envserve.worker.frame_board import PictureBoard

__all__ = ["Camera", "headless_settings", "jpeg_of", "render"]

#: For so many times as long as it took there is no other picture. What is loaded for a
#: row's first one is spread, but counts no more than that.
_REST: Final = 59
_MOST_FIRST_NS: Final = 1_000_000_000
#: How many processes of a worker may end in a render before there is no other.
_MAX_ENDED: Final = 2
_QUALITIES: Final = (75, 50, 25)
#: In texts for terminals.
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class Camera:
    """Shows what is watched of a worker's rows, one row at a time.

    Attributes:
      until: Its first number is 0 while nobody looks.
    """

    def __init__(
        self,
        build: Mapping[str, Any],
        spec: EnvSpec,
        blocks: Mapping[int, Sequence[Any]],
        slab: Slab,
        ring: ActionRing,
    ) -> None:
        """Takes what the worker was told to build, and the envs of each block."""
        num_envs = build["num_envs"]
        memory = slab.extra[ring_nbytes(spec, num_envs) :]
        self._board = PictureBoard(num_envs, build["num_workers"], memory)
        self.until = self._board.until
        self._worker = build["worker"]
        self._heartbeat = slab.heartbeats[self._worker].data
        self._ring = ring
        #: First row of the block, and the env, of each row.
        self._rows = {
            row: (start, blocks[index][min(row - start, len(blocks[index]) - 1)])
            for index, start, stop in build["blocks"]
            for row in range(start, stop)
        }
        self._shown_at = dict.fromkeys(self._rows, 0)
        self._rests_until = 0

    def look(self) -> None:
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
            seed, steps = self._ring.seed_and_steps(row, self._rows[row][0])
            known: Any = {"row": row, "seed": seed, "episode_steps": steps}
            picture = Picture(serial=begin, jpeg=jpeg, text=text[:MAX_TEXT], **known)
            self._board.show(slot, picture)
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
            frame = self._rows[row][1].render(row)
            jpeg = jpeg_of(frame, width)
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


def jpeg_of(frame: Any, width: int) -> bytes:
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
