"""Workers render the envs that are watched, and no others."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from envserve.crashes.action_ring import ActionRing, ring_nbytes
from envserve.lane import MAX_JPEG_BYTES, RenderedFrame
from envserve.slab import Slab
from envserve.spaces.env_spec import EnvSpec
from envserve.text import install_command, without_folders
from envserve.worker import rendering
from envserve.worker.frame_board import MAX_WATCHED, FrameBoard
from envserve.worker.frame_board import board_nbytes as board_bytes
from envserve.worker.rendering import FrameRenderer, encode_jpeg, render

SPEC = EnvSpec("Tiny-v0", spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2))
GREY = np.full((40, 60, 3), 90, np.uint8)
SECOND = 10**9


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100 * SECOND

    def monotonic_ns(self) -> int:
        return self.now


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("the server is gone")


class Shown:
    """An env whose frame, exception and rendering time the test sets."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.frame: Any = GREY
        self.seconds = 0.001
        self.asked: list[int] = []

    def render(self, row: int) -> Any:
        self.asked.append(row)
        self.clock.now += int(self.seconds * SECOND)
        if isinstance(self.frame, BaseException):
            raise self.frame
        return self.frame


class Studio:
    """A one-block worker's renderer, its frame board, and a clock."""

    def __init__(self, num_envs: int = 3) -> None:
        extra = ring_nbytes(SPEC, num_envs) + board_bytes(num_envs, 1)
        self.slab = Slab.create(SPEC, num_envs, 1, extra)
        self.clock = Clock()
        self.envs = [Shown(self.clock) for _ in range(num_envs)]
        self.rows = range(num_envs)
        self.memory = self.slab.extra[ring_nbytes(SPEC, num_envs) :]
        self.board = FrameBoard(num_envs, 1, self.memory)
        self.renderer = self.start()

    def start(self) -> FrameRenderer:
        """Return the renderer of a new worker process."""
        ring = ActionRing(SPEC, len(self.envs), self.slab.extra)
        return FrameRenderer(self.board, 0, self.slab.heartbeats[0].data, ring, [self])

    def render(self, row: int) -> Any:
        return self.envs[row].render(row)

    def watch(self, *rows: int, width: int = 160, seconds: float = 3.0) -> None:
        now = self.clock.now
        self.board.watch(rows, width, now + int(seconds * SECOND))

    def look(self, after_seconds: float = 0.0) -> None:
        """Render the row that is due, as a worker does after each operation."""
        self.clock.now += int(after_seconds * SECOND)
        if self.renderer.watched_until[0]:
            self.renderer.render_due_row()

    def see(self, row: int = 0) -> RenderedFrame:
        frame = self.board.latest(row)
        assert frame is not None
        return frame


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    made = Studio()
    monkeypatch.setattr(rendering, "unpatched", made.clock)
    yield made
    made.slab.close()


@pytest.fixture(autouse=True)
def keep_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "headless_variables", lambda _: {})


def size_of(jpeg: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(jpeg)).size


# Watching.


def test_without_watchers_nothing_is_rendered(studio: Studio) -> None:
    for _ in range(100):
        studio.look(1.0)
    assert not any(env.asked for env in studio.envs)
    assert studio.board.latest(0) is None


def test_a_watched_row_has_a_frame(studio: Studio) -> None:
    studio.watch(1)
    studio.look()
    frame = studio.see(1)
    assert (frame.row, frame.text, frame.seed) == (1, "", None)
    assert size_of(frame.jpeg) == (60, 40)
    assert studio.board.latest(1, frame.serial) is None
    assert studio.board.latest(0) is None
    assert [env.asked for env in studio.envs] == [[], [1], []]


def test_rendering_ends_with_the_last_watch(studio: Studio) -> None:
    studio.watch(0)
    studio.look()
    studio.look(4.0)
    assert studio.renderer.watched_until[0] == 0
    studio.look(1.0)
    assert len(studio.envs[0].asked) == 1
    studio.watch(0)
    studio.look(1.0)
    assert len(studio.envs[0].asked) == 2


def test_rendering_takes_a_sixtieth_of_the_time_and_rows_take_turns(
    studio: Studio,
) -> None:
    begin = studio.clock.now
    for env, seconds in zip(studio.envs, (0.001, 0.05, 0.2), strict=True):
        env.seconds = seconds
    while studio.clock.now < begin + 240 * SECOND:
        studio.watch(0, 1, 2)
        studio.look(0.002)
    counts = [len(env.asked) for env in studio.envs]
    drawn = sum(n * env.seconds for n, env in zip(counts, studio.envs, strict=True))
    assert drawn - 0.251 <= 240 / 60 + 0.2  # plus first frames and the one that is due
    assert min(counts) >= 14
    assert max(counts) - min(counts) <= 1


def test_slow_first_frames_do_not_delay_other_rows(studio: Studio) -> None:
    for env in studio.envs:
        env.seconds = 0.5
    studio.watch(0, 1, 2, seconds=100.0)
    seen = []
    for _ in range(3):
        studio.look(1.001)
        seen.append([len(env.asked) for env in studio.envs])
    assert seen == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    studio.look(29.0)
    assert [len(env.asked) for env in studio.envs] == [2, 1, 1]
    studio.look(29.0)
    assert [len(env.asked) for env in studio.envs] == [2, 1, 1]


def test_the_slot_of_the_row_requested_least_recently_is_reused() -> None:
    num_envs = MAX_WATCHED + 10
    board = FrameBoard(num_envs, 1, bytearray(board_bytes(num_envs, 1)))
    board.watch(range(MAX_WATCHED), 100, 50)
    board.watch(range(1, MAX_WATCHED), 100, 60)
    board.watch([num_envs - 1, num_envs], 100, 70)
    watched = {*board.watched[:, 0].tolist()}
    assert watched == {*range(1, MAX_WATCHED), num_envs - 1}
    assert board_bytes(1 << 16, 1) < 16 << 20


def test_corrupt_requests_do_not_prevent_new_ones() -> None:
    num_envs = MAX_WATCHED + 1
    board = FrameBoard(num_envs, 1, bytearray(board_bytes(num_envs, 1)))
    board.watch(range(MAX_WATCHED), 100, 50)
    board.watched[:] = -7  # an env may write to this memory
    board.watch([MAX_WATCHED], 100, 60)
    assert board.watched[0].tolist() == [MAX_WATCHED, 60, 100]


# Frames from envs.


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ("S F\nH G", "S F\nH G"),
        (None, "got None"),
        (7, "got int"),
        (np.zeros((4, 4, 3)), "got float64[4, 4, 3]"),
        (np.zeros((0, 4, 3), np.uint8), "render() raised"),
        (SilentError(), "render() raised SilentError: <exception str() failed>"),
        (ZeroDivisionError("by /srv/sim/env.py"), "ZeroDivisionError: by env.py"),
        ("\x1b[31;1mS\x1b[0m F", "S F"),
        ("\x1b[H" + "a" * 5000, "\\x1b[Ha"),
    ],
)
def test_frames_that_are_no_images_are_described(
    studio: Studio, frame: Any, text: str
) -> None:
    studio.envs[0].frame = frame
    studio.watch(0, 1)
    studio.look()
    studio.look(1.0)
    assert text in studio.see(0).text
    assert studio.see(0).jpeg == b""
    assert studio.see(1).jpeg, "it costs other rows nothing"


@pytest.mark.parametrize(
    ("frame", "width", "size"),
    [
        (np.zeros((2160, 3840, 3), np.uint8), 160, (160, 90)),
        ([GREY, GREY[:20]], 160, (60, 20)),
        (GREY[:, :, 0], 160, (60, 40)),
        (np.zeros((40, 60, 4), np.uint8), 30, (30, 20)),
        (np.zeros((9000, 30, 3), np.uint8), 20, (1, 40)),
    ],
    ids=["4K", "the last of a list", "grey", "with alpha", "tall"],
)
def test_images_of_all_sizes(frame: Any, width: int, size: Any) -> None:
    assert size_of(encode_jpeg(frame, width)) == size


def test_frames_are_scaled_down_until_they_fit(random_generator: Any) -> None:
    noise = random_generator.integers(0, 256, (1024, 1024, 3), np.uint8)
    assert len(encode_jpeg(noise, 1024)) <= MAX_JPEG_BYTES


def test_without_pillow_the_extra_is_named(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    studio.watch(0)
    studio.look()
    assert without_folders(install_command("page")) in studio.see().text


def test_an_env_whose_render_ends_its_process_twice_is_not_rendered_again(
    studio: Studio,
) -> None:
    for row, env in enumerate(studio.envs):
        env.frame = GREY if row else SystemExit()  # exits the process
    studio.watch(0, 1, seconds=1000.0)
    for _ in range(2):
        with pytest.raises(SystemExit):
            studio.look(100.0)
        studio.renderer = studio.start()
    for _ in range(5):
        studio.look(100.0)
    assert studio.envs[0].asked == [0, 0]
    assert "render() crashed or hung" in studio.see(0).text
    assert "render() crashed or hung" in studio.see(1).text


# Corrupt frames.


@pytest.mark.parametrize(
    ("before", "after", "byte"), [(0, 1, 255), (64, 0, 255), (64, 500, 7)]
)
def test_a_half_written_frame_is_ignored(
    studio: Studio, before: int, after: int, byte: int
) -> None:
    """The JPEG, the header, or both are corrupt."""
    studio.watch(0)
    studio.look()
    at = bytes(studio.memory).index(studio.see(0).jpeg) + (after == 1) * 100
    studio.memory[at - before : at + after] = bytes([byte]) * (before + after)
    assert studio.board.latest(0) is None


def test_a_frame_of_another_row_is_ignored(studio: Studio) -> None:
    studio.watch(0)
    studio.board.write(0, RenderedFrame(row=0, serial=5))
    assert studio.see(0)
    studio.board.write(0, RenderedFrame(row=2, serial=6))
    assert studio.board.latest(0) is None


# Envs that are built without a render mode.


@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1"])
def test_an_env_without_render_mode_is_rendered_and_not_changed(name: str) -> None:
    env = gymnasium.make(name, disable_env_checker=True)
    twin = gymnasium.make(name, disable_env_checker=True)
    env.reset(seed=3), twin.reset(seed=3)
    for step in range(60):
        frame = render(env)
        assert encode_jpeg(frame, 100)
        assert env.unwrapped.render_mode is None
        results = [each.step(step % 2) for each in (env, twin)]
        assert str(results[0]) == str(results[1])
        if results[0][2] or results[0][3]:
            assert str(env.reset()) == str(twin.reset())
    env.close()


def test_frames_collected_for_the_env_user_are_not_changed() -> None:
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array_list")
    env.reset(seed=0)
    assert encode_jpeg(render(env), 100)
    frames: Any = env.render()
    assert len(frames) == 1
    env.close()


def test_frames_that_an_env_collects_itself_are_not_removed() -> None:
    frames = [GREY]
    env = SimpleNamespace(render_mode="rgb_array_list", render=frames.pop)
    assert render(env) == "no image: the env collects its frames itself"
    assert frames


@pytest.mark.parametrize("metadata", [{"render_modes": ["human"]}, None])
def test_an_env_that_cannot_render_arrays_keeps_its_render_mode(metadata: Any) -> None:
    asked = []
    inner = SimpleNamespace(render_mode=None, metadata=metadata)
    env = SimpleNamespace(unwrapped=inner, render=lambda: asked.append(1))
    assert render(env) is None
    assert (asked, inner.render_mode) == ([1], None)


def test_an_env_without_attributes_is_rendered() -> None:
    assert render(SimpleNamespace(render=lambda: GREY)) is GREY
