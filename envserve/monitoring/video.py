"""Write frames to MP4 and GIF files with ffmpeg.

Frames are written to a `.partial` file, which is renamed once the video is complete.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from envserve.errors import VideoError
from envserve.text import install_command

_FINISH_SECONDS: Final = 120.0
#: Maps file suffixes to output options of ffmpeg. Most players need yuv420p, which
#: requires even widths and heights, so frames are padded.
_FORMATS: Final = {
    ".mp4": "-vf pad=ceil(iw/2)*2:ceil(ih/2)*2 -c:v libx264 -preset veryfast "
    "-pix_fmt yuv420p -f mp4",
    ".gif": "-vf split[a][b];[a]palettegen[p];[b][p]paletteuse -f gif",
}


def find_ffmpeg() -> str:
    """Return the path of ffmpeg: from imageio-ffmpeg, otherwise from PATH.

    Raises:
      VideoError: ffmpeg was not found.
    """
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return str(get_ffmpeg_exe())
    except (ModuleNotFoundError, RuntimeError) as error:
        path = shutil.which("ffmpeg")
        if path is None:
            raise VideoError(
                f"ffmpeg is needed to write videos, but was not found ({error}); run "
                f"{install_command('video')}, or install ffmpeg on your system"
            ) from error
        return path


class VideoWriter:
    """Context manager that writes one video, unless its body raises an exception.

    Attributes:
      frames_per_second: Frame rate of the video; fixed once the first frame is added.
      num_frames: Number of frames added so far.
    """

    def __init__(self, path: Path, frames_per_second: float = 30.0) -> None:
        """Find ffmpeg, which is started when the first frame is added.

        An existing file is replaced once the video is complete.

        Raises:
          VideoError: The suffix is not .mp4 or .gif, or ffmpeg was not found.
        """
        if path.suffix not in _FORMATS:
            raise VideoError(f"expected a file name ending in .mp4 or .gif; got {path}")
        self.frames_per_second = frames_per_second
        self.num_frames = 0
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._ffmpeg = find_ffmpeg()
        self._shape: tuple[int, ...] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115

    def __repr__(self) -> str:
        return f"<VideoWriter {self._path}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        """Complete the file if there are frames, or discard it after an exception.

        Raises:
          VideoError: ffmpeg could not write the file; no partial file remains.
        """
        try:
            if exception_type is None and self._process is not None:
                self._complete(self._process)
        finally:
            self.discard()
            self._messages.close()

    def add(self, frame: np.ndarray[Any, Any]) -> None:
        """Append a frame, uint8 `[height, width, 3]`.

        Raises:
          VideoError: The frame's shape differs from the first frame's, or ffmpeg
            failed.
        """
        if self._process is None:
            self._shape = frame.shape
            self._process = self._start(*frame.shape[:2])
        if frame.shape != self._shape:
            raise VideoError(
                f"{self._path}: expected a frame of shape {self._shape}, as before; "
                f"got {frame.shape}; make the env render all frames at the same size"
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(np.ascontiguousarray(frame).data)
        except BrokenPipeError as error:
            self._process.wait(_FINISH_SECONDS)
            raise self._failure() from error
        self.num_frames += 1

    def discard(self) -> None:
        """Stop ffmpeg and remove the partial file."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
            self._partial.unlink(missing_ok=True)

    def _start(self, height: int, width: int) -> subprocess.Popen[bytes]:
        options = (
            f"-y -loglevel error -f rawvideo -pix_fmt rgb24 -s {width}x{height} "
            f"-r {self.frames_per_second:g} -i - {_FORMATS[self._path.suffix]}"
        )
        try:
            # ffmpeg would overwrite the target of a link.
            self._partial.unlink(missing_ok=True)
        except OSError as error:
            raise VideoError(
                f"{self._path}: expected a file that can be written; {self._partial} "
                f"cannot be replaced: {error.strerror}"
            ) from error
        try:
            return subprocess.Popen(
                [self._ffmpeg, *options.split(), str(self._partial.absolute())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
            )
        except OSError as error:
            raise VideoError(
                f"{self._ffmpeg} cannot be run: {error.strerror}; run "
                f"{install_command('video')}, which installs an ffmpeg binary"
            ) from error

    def _complete(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.communicate(timeout=_FINISH_SECONDS)
            if process.returncode != 0:
                raise self._failure()
            self._partial.replace(self._path)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise VideoError(
                f"{self._path}: the video cannot be completed: {error}"
            ) from error

    def _failure(self) -> VideoError:
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").split("\n")
        messages = [line.strip() for line in lines if line.strip()]
        return VideoError(
            f"{self._path}: ffmpeg cannot write the video: "
            f"{messages[0] if messages else 'it exited without a message'}"
        )
