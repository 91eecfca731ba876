"""Write frames to MP4 and GIF files with ffmpeg.

A file with its final name is complete: frames go to one that ends in `.partial`.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from envserve.errors import VideoError

_FINISH_SECONDS: Final = 120.0
#: By suffix. Players want yuv420p, which takes even sizes only.
_FORMATS: Final = {
    ".mp4": "-vf pad=ceil(iw/2)*2:ceil(ih/2)*2 -c:v libx264 -preset veryfast "
    "-pix_fmt yuv420p -f mp4",
    ".gif": "-vf split[a][b];[a]palettegen[p];[b][p]paletteuse -f gif",
}


def find_ffmpeg() -> str:
    """Returns the ffmpeg to use: that of imageio-ffmpeg, else the system's.

    Raises:
      VideoError: There is none.
    """
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return str(get_ffmpeg_exe())
    except (ModuleNotFoundError, RuntimeError) as error:
        found = shutil.which("ffmpeg")
        if found is None:
            raise VideoError(
                f"videos need ffmpeg ({error}): pip install 'envserve[video]', which "
                "brings one, or install that of your system"
            ) from error
        return found


class VideoWriter:
    """Writes one video; a context manager. Leaving it by an exception leaves no file.

    Attributes:
      frames_per_second: How fast it plays; what holds is that at the first frame.
      num_frames: How many it has got.
    """

    def __init__(self, path: Path, frames_per_second: float = 30.0) -> None:
        """Finds what writes it, and nothing else yet; a file that exists is replaced.

        Raises:
          VideoError: It is no MP4 or GIF file, or there is no ffmpeg.
        """
        if path.suffix not in _FORMATS:
            raise VideoError(f"expected a file that ends in .mp4 or .gif; got {path}")
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
        """Completes the file, if there were any frames, or removes it.

        Raises:
          VideoError: ffmpeg could not write it; nothing is left of it.
        """
        try:
            if exception_type is None and self._process is not None:
                self._complete(self._process)
        finally:
            self.discard()
            self._messages.close()

    def add(self, frame: np.ndarray[Any, Any]) -> None:
        """Appends a frame, uint8 `[height, width, 3]`.

        Raises:
          VideoError: It has another size than the first one, or ffmpeg cannot write it.
        """
        if self._process is None:
            self._shape = frame.shape
            self._process = self._start(*frame.shape[:2])
        if frame.shape != self._shape:
            raise VideoError(
                f"{self._path}: expected frames of one size, {self._shape}, got "
                f"{frame.shape}; have the env render all alike"
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(np.ascontiguousarray(frame).data)
        except BrokenPipeError as error:
            self._process.wait(_FINISH_SECONDS)
            raise self._failure() from error
        self.num_frames += 1

    def discard(self) -> None:
        """Gives up the frames so far; nothing is left of them."""
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
            return subprocess.Popen(
                [self._ffmpeg, *options.split(), str(self._partial.absolute())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
            )
        except OSError as error:
            raise VideoError(
                f"{self._ffmpeg}: expected an ffmpeg that runs; {error.strerror}; "
                "pip install 'envserve[video]' brings one"
            ) from error

    def _complete(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.communicate(timeout=_FINISH_SECONDS)
            if process.returncode != 0:
                raise self._failure()
            self._partial.replace(self._path)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise VideoError(
                f"{self._path}: expected a video that can be completed; {error}"
            ) from error

    def _failure(self) -> VideoError:
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return VideoError(
            f"{self._path}: expected a video that ffmpeg can write; "
            f"{said[-1] if said else 'it ended without a word'}"
        )
