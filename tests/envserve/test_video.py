"""Videos contain every frame, and incomplete video files are removed."""

import ctypes.util
import re
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from envserve.errors import VideoError
from envserve.monitoring.video import VideoWriter, find_ffmpeg
from envserve.text import install_command
from envserve.worker.rendering import headless_variables
from tests.ppo.film_env import read_video


def test_a_video_contains_all_frames_in_order(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    with VideoWriter(path, 12.5) as video:
        for brightness in range(0, 250, 10):
            video.add(np.full((33, 47, 3), brightness, np.uint8)[::-1])
        assert list(tmp_path.iterdir()) == [path.with_name("film.mp4.partial")]
    assert list(tmp_path.iterdir()) == [path]
    frames = read_video(path, 34, 48)  # odd sizes are padded
    brightness_read = frames[:, :33, :47].mean(axis=(1, 2, 3))
    np.testing.assert_allclose(brightness_read, np.arange(0, 250, 10), atol=4)


def test_a_frame_is_upright_and_keeps_its_colours(tmp_path: Path) -> None:
    frame = np.zeros((32, 64, 3), np.uint8)
    frame[:16, :32] = 200, 100, 50
    with VideoWriter(tmp_path / "film.mp4", 30) as video:
        video.add(frame)
    (shown,) = read_video(tmp_path / "film.mp4", 32, 64).astype(float)
    corners = [shown[:8, :16], shown[:8, 48:], shown[24:, :16], shown[24:, 48:]]
    colours = [corner.mean(axis=(0, 1)) for corner in corners]
    np.testing.assert_allclose(colours, [(200, 100, 50), *[(0, 0, 0)] * 3], atol=8)


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        VideoWriter(tmp_path / "film.mp4") as video,
    ):
        video.add(np.zeros((16, 16, 3), np.uint8))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_replaced_and_its_target_is_kept(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    path = tmp_path / "film.mp4"
    for name in ("film.mp4", "film.mp4.partial"):
        (tmp_path / name).symlink_to(precious)
    with VideoWriter(path) as video:
        video.add(np.zeros((16, 16, 3), np.uint8))
    assert precious.read_text() == "x"
    assert not path.is_symlink()
    (tmp_path / "other.mp4.partial").mkdir()
    with (
        pytest.raises(VideoError, match="cannot be replaced"),
        VideoWriter(tmp_path / "other.mp4") as video,
    ):
        video.add(np.zeros((16, 16, 3), np.uint8))


def test_the_error_contains_the_first_message_of_ffmpeg(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "film.mp4"
    for count in (10**9, 1):  # ffmpeg exits while frames are written, or afterwards
        with (  # noqa: PT012
            pytest.raises(
                # Later messages of ffmpeg do not contain the path.
                VideoError,
                match=r"ffmpeg cannot write the video: .*partial: No such file",
            ),
            VideoWriter(path, 30) as video,
        ):
            for _ in range(count):
                video.add(np.zeros((480, 480, 3), np.uint8))


def test_an_ffmpeg_that_cannot_be_run_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = str(tmp_path / "none")
    monkeypatch.setattr("envserve.monitoring.video.find_ffmpeg", lambda: none)
    with (
        VideoWriter(tmp_path / "film.mp4") as video,
        pytest.raises(VideoError, match="none cannot be run: No such"),
    ):
        video.add(np.zeros((16, 16, 3), np.uint8))


def test_the_ffmpeg_in_path_is_used_without_imageio_ffmpeg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(VideoError, match=re.escape(install_command("video"))):
        find_ffmpeg()
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_ffmpeg() == str(program)


def test_a_gif_contains_all_frames(tmp_path: Path) -> None:
    path = tmp_path / "film.gif"
    with VideoWriter(path) as video:
        video.frames_per_second = 10
        for brightness in (0, 100, 200):
            video.add(np.full((33, 47, 3), brightness, np.uint8))
    assert video.num_frames == 3
    brightness_read = read_video(path, 33, 47).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(brightness_read, [0, 100, 200], atol=4)


def test_other_file_suffixes_raise(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"ending in \.mp4 or \.gif; got .*film\.avi"):
        VideoWriter(tmp_path / "film.avi")


def test_headless_rendering_needs_no_display_and_uses_the_installed_opengl_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"EGL", "OSMesa"}
    monkeypatch.setattr(
        ctypes.util, "find_library", lambda name: name if name in installed else None
    )
    monkeypatch.setattr(sys, "platform", "linux")
    dummy = {"SDL_VIDEODRIVER": "dummy"}
    assert headless_variables({}) == dummy | {"MUJOCO_GL": "egl"}
    assert headless_variables({"DISPLAY": ":0"}) == {}
    assert headless_variables({"MUJOCO_GL": "osmesa"}) == dummy
    installed.remove("EGL")
    assert headless_variables({}) == dummy | {"MUJOCO_GL": "osmesa"}
    installed.clear()
    assert headless_variables({}) == dummy
    monkeypatch.setattr(
        ctypes.util, "find_library", mock.Mock(side_effect=FileNotFoundError)
    )
    assert headless_variables({}) == dummy
