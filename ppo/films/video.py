"""Frames into MP4 files, by ffmpeg.

A file with its proper name is complete: frames go to one that ends in `.partial`.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import numpy as np

from ppo.errors import OutputError, VideoError

__all__ = ["VideoWriter", "find_ffmpeg"]

_FINISH_SECONDS = 120.0


def find_ffmpeg() -> str:
    """Return the ffmpeg to use: that of imageio-ffmpeg, else the system's.

    Raises:
        VideoError: there is none.
    """
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return str(get_ffmpeg_exe())
    except (ModuleNotFoundError, RuntimeError) as error:
        found = shutil.which("ffmpeg")
        if found is None:
            raise VideoError(
                f"Videos need ffmpeg ({error}): pip install 'envserve[video]', which "
                "brings one, or install that of your system."
            ) from error
        return found


class VideoWriter:
    """Writes one video; a context manager.

    Leaving it by an exception leaves no file.

    Args:
        path: the MP4 file; one that exists is replaced.
        frames_per_second: how fast it plays.
        ffmpeg: the program, see `find_ffmpeg`.
    """

    def __init__(self, path: Path, frames_per_second: float, ffmpeg: str) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._frames_per_second = frames_per_second
        self._ffmpeg = ffmpeg
        self._shape: tuple[int, ...] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115

    def __repr__(self) -> str:
        """Tell which file is written."""
        return f"<VideoWriter {self._path}>"

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        """Complete the file, if there were any frames, or remove it after an exception.

        Raises:
            OutputError: ffmpeg could not write it; nothing is left of it.
        """
        try:
            if exception_type is None and self._process is not None:
                self._complete(self._process)
        finally:
            self.discard()
            self._messages.close()

    def add(self, frame: np.ndarray) -> None:
        """Append a frame, uint8 `[height, width, 3]`.

        Raises:
            VideoError: the frame has another size than the first one.
            OutputError: ffmpeg cannot write the file.
        """
        if self._process is None:
            self._shape = frame.shape
            self._process = self._start(*frame.shape[:2])
        if frame.shape != self._shape:
            raise VideoError(
                f"{self._path}: expected frames of one size, {self._shape}, got "
                f"{frame.shape}; have the env render all alike."
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(np.ascontiguousarray(frame).data)
        except BrokenPipeError as error:
            self._process.wait(_FINISH_SECONDS)
            raise self._failure() from error

    def discard(self) -> None:
        """Give up the frames so far; nothing is left of them."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
            self._partial.unlink(missing_ok=True)

    def _start(self, height: int, width: int) -> subprocess.Popen[bytes]:
        # Players want yuv420p, which takes even sizes only.
        options = f"""
            -y -loglevel error
            -f rawvideo -pix_fmt rgb24 -s {width}x{height}
            -r {self._frames_per_second:g} -i -
            -vf pad=ceil(iw/2)*2:ceil(ih/2)*2
            -c:v libx264 -preset veryfast -pix_fmt yuv420p -f mp4
        """
        try:
            return subprocess.Popen(
                [self._ffmpeg, *options.split(), str(self._partial.absolute())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
            )
        except OSError as error:
            raise VideoError(
                f"{self._ffmpeg}: expected an ffmpeg that runs; {error.strerror}. "
                "pip install 'envserve[video]' brings one."
            ) from error

    def _complete(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.communicate(timeout=_FINISH_SECONDS)
            if process.returncode != 0:
                raise self._failure()
            self._partial.replace(self._path)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise OutputError(
                f"{self._path}: expected a video that can be completed; {error}."
            ) from error

    def _failure(self) -> OutputError:
        self._messages.seek(0)
        lines = self._messages.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return OutputError(
            f"{self._path}: expected a video that ffmpeg can write; "
            f"{said[-1] if said else 'it ended without a word'}."
        )
