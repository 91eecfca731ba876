"""The progress display at any width, with and without a terminal."""

import contextlib
import io
import logging
import math
import os
import re
import signal
import tempfile
import threading
from unittest import mock

import pytest
from rich.console import Console

from ppo.cli.options import (
    Terminated,
    deferred_stderr,
    preserved_interrupts,
    sigterm_raises,
    start_tensorflow,
)
from ppo.cli.progress import Screen, sparkline
from ppo.config.named_configs import CONFIGS
from ppo.errors import BadInputError
from ppo.train import Progress

METRICS = {"policy_loss": -0.0123, "value_loss": 0.5, "entropy": 0.69}


class Clock:
    """A fake clock that tests advance manually."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def console(width: int, *, is_terminal: bool, encoding: str = "utf-8") -> Console:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(
        file=stream, width=width, force_terminal=is_terminal, color_system=None
    )


def train_a_little(screen: Screen, clock: Clock) -> None:
    screen.total_steps = 40_960
    screen.phase("compiling")
    clock.now += 3.0
    screen.show(Progress(2_048, 900.0, math.nan, 0, METRICS))
    clock.now += 10.0
    screen.show(Progress(22_528, 2_345.6, 21.25, 1_234, METRICS))
    clock.now += 2.0


def redrawn(screen: Screen, target: Console) -> str:
    """Return the lines that a terminal shows, which are redrawn regularly."""
    with target.capture() as capture:
        target.print(screen._rows())
    return capture.get()


def drawn(
    width: int, clock: Clock, encoding: str = "utf-8", idle_seconds: float = 0.0
) -> list[str]:
    """Return the redrawn lines of a training run."""
    target = console(width, is_terminal=True, encoding=encoding)
    screen = Screen(target)
    train_a_little(screen, clock)
    clock.now += idle_seconds
    lines = [line.rstrip() for line in redrawn(screen, target).splitlines()]
    return [
        re.sub(r"^[^a-z] (?=training)", "", line) for line in lines
    ]  # without the spinner


def test_a_terminal_shows_a_progress_bar_and_results(clock: Clock) -> None:
    timing, results = drawn(120, clock)
    assert re.fullmatch(
        r"training 12 s  ━+.*  7 s left  22,528/40,960 steps  2,346 steps/s", timing
    )
    assert re.fullmatch(
        r"return 21\.2  ▁+  1,234 lost  value loss 0\.5  policy loss -0\.012"
        r"  entropy 0\.69",
        results,
    )


def test_control_characters_and_markup_are_shown_as_text() -> None:
    target = console(80, is_terminal=True)
    screen = Screen(target)
    with target.capture() as capture:
        screen.print("a \x1b[2J\nb [red]")
    assert capture.get() == "a \\x1b[2J\nb [red]\n"
    for show in (screen.phase, screen.rename):
        show("seed 0: \x1bc[/usr/bin] [1]")
        assert r"seed 0: \x1bc[/usr/bin] [1] 0 s" in redrawn(screen, target)


def test_a_stalled_run_shows_no_time_left(clock: Clock) -> None:
    line, _ = drawn(120, clock, idle_seconds=60.0)
    assert "no progress for 0:01:02  22,528/40,960 steps  0 steps/s" in line
    assert "left" not in line


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 120])
def test_cells_that_do_not_fit_are_omitted_and_none_is_truncated(
    width: int, clock: Clock
) -> None:
    whole = {cell for line in drawn(160, clock) for cell in re.split("  +", line)}
    lines = drawn(width, clock)
    assert len(lines) == 2
    for line in lines:
        assert len(line) <= width - (line is lines[0]) * 2
        cells = [cell for cell in re.split("  +", line) if not set(cell) & set("━▁")]
        assert set(cells) <= whole
    assert ("left" in lines[0]) == (width > 30)


def test_an_ascii_terminal_has_an_ascii_bar(clock: Clock) -> None:
    text = "\n".join(drawn(80, clock, "ascii"))
    assert text.isascii()
    assert "return 21.2" in text


def test_without_a_terminal_there_are_plain_lines(clock: Clock) -> None:
    target = console(80, is_terminal=False)
    with Screen(target) as screen:
        train_a_little(screen, clock)
        screen.phase("evaluating", is_transient=True)
        screen.phase("")
        screen.print("[3] done")
    target.file.seek(0)
    assert target.file.read().splitlines() == [
        "compiling ...",
        "2,048/40,960 steps, 900 steps/s, return -, value loss 0.5, "
        "policy loss -0.012, entropy 0.69, ? left",
        "[3] done",
    ]


def test_without_a_terminal_a_long_phase_prints_lines_regularly(clock: Clock) -> None:
    lines: list[str] = []
    has_four = threading.Event()

    class Recorder(Screen):
        def print(self, text: str, style: str | None = None) -> None:
            lines.append(text)
            if len(lines) == 4:
                has_four.set()

    with Recorder(console(80, is_terminal=False), seconds_between_lines=0.01) as screen:
        screen.phase("compiling")
        assert has_four.wait(60)
    assert lines[:3] == ["compiling ...", *2 * ["compiling, 0 s so far"]]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_output_that_cannot_be_written_does_not_end_a_run(
    clock: Clock, is_terminal: bool
) -> None:
    tried = threading.Event()

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            if threading.current_thread() is not threading.main_thread():
                tried.set()
            raise OSError(28, "No space left on device")

    target = Console(file=Full(), width=80, force_terminal=is_terminal)
    with Screen(target, seconds_between_lines=0.01) as screen:
        train_a_little(screen, clock)
        assert tried.wait(300)
        screen.print("[3] done")
    assert not screen._ticker.is_alive()


def test_the_activity_of_a_phase_is_shown_until_the_phase_ends(clock: Clock) -> None:
    target = console(80, is_terminal=True)
    screen = Screen(target)
    screen.phase("first iteration", activity=lambda: "waiting for envs")
    clock.now += 75.0
    assert "first iteration: waiting for envs 0:01:15" in redrawn(screen, target)


def test_the_final_evaluation_does_not_show_the_numbers_of_training(
    clock: Clock,
) -> None:
    target = console(120, is_terminal=True)
    screen = Screen(target)
    train_a_little(screen, clock)
    for is_transient in (True, False):
        screen.phase("evaluating 5 episodes", is_transient=is_transient)
        text = redrawn(screen, target)
        assert "evaluating 5 episodes 0 s" in text
        assert ("steps/s" in text) == is_transient


def test_the_time_left_ignores_iterations_before_the_first_update(clock: Clock) -> None:
    target = console(120, is_terminal=True)
    screen = Screen(target)
    screen.total_steps = 10_000
    for steps, seconds, metrics in [
        (500, 0.1, {}),  # random actions
        (1_000, 0.1, {}),
        (1_010, 1.0, METRICS),
        (1_100, 9.0, METRICS),
    ]:
        clock.now += seconds
        screen.show(Progress(steps, 10.0, 0.0, 0, metrics))
    assert "  0:14:50 left  " in redrawn(screen, target)


def test_the_time_left_of_an_endless_run_is_shown(clock: Clock) -> None:
    target = console(120, is_terminal=True)
    screen = Screen(target)
    screen.total_steps = 2**53
    for steps in (10, 20):
        clock.now += 1.0
        screen.show(Progress(steps, 10.0, 0.0, 0, METRICS))
    assert "  999999999 days, 23:59:59 left  " in redrawn(screen, target)


def test_finished_phases_leave_a_line(clock: Clock) -> None:
    target = console(80, is_terminal=True)
    with Screen(target) as screen:
        train_a_little(screen, clock)
        screen.phase("evaluating")
        clock.now += 75.0
    target.file.seek(0)
    text = target.file.read()
    assert "compiling, 3 s\n" in text
    assert "training, 12 s: 22,528/40,960 steps, return 21.2 ▁▁▁" in text
    assert "evaluating, 0:01:15\n" in text


def test_log_records_contain_only_numbers_that_json_has() -> None:
    logger = mock.Mock(spec=logging.Logger)
    screen = Screen(console(80, is_terminal=False), logger)
    screen.show(Progress(64, 2.0, math.nan, 0, {"kl": 0.1, "mine": math.inf}))
    fields = {"steps": 64, "steps_per_second": 2.0, "lost_steps": 0, "kl": 0.1}
    assert logger.info.call_args.kwargs["extra"] == {"fields": fields}


def test_a_sparkline_covers_all_numbers_at_any_width() -> None:
    assert sparkline(range(8), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(range(800), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 2.0], 4) == "▁▁██"
    assert sparkline([3.0], 3) == "▁▁▁"
    assert sparkline([], 3) == ""


def test_a_suppressed_interrupt_is_raised_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), preserved_interrupts():  # noqa: PT012
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ImportError("half of it is not there")
    with preserved_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_suppressed_signal_is_raised_again_only_within_sigterm_raises(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with sigterm_raises(), pytest.raises(Terminated), preserved_interrupts():  # noqa: PT012
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        raise ImportError("half of it is not there")
    with preserved_interrupts():
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


def test_deferred_stderr_is_written_only_after_an_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with deferred_stderr():
        os.write(2, b"discarded")
    with pytest.raises(ValueError, match="it fails"), deferred_stderr():  # noqa: PT012
        os.write(2, b"why it fails; ")
        raise ValueError("it fails")
    os.write(2, b"after that")
    assert capfd.readouterr().err == "why it fails; after that"


def test_a_missing_temporary_folder_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/missing"])
    with (
        mock.patch.object(tempfile, "tempdir", None),
        pytest.raises(BadInputError, match=r"TensorFlow needs .*; set TMPDIR"),
    ):
        start_tensorflow(1, 1)


@pytest.mark.parametrize("name", ["pong", "cartpole"])
def test_tensorflow_uses_the_gpu_only_for_images_and_is_the_backend_of_keras(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS"):
        monkeypatch.setenv(variable, "0")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr("ppo.cli.options.enable_compilation_cache", lambda _: None)
    with mock.patch("tensorflow.config") as config:
        config.list_physical_devices.return_value = ["GPU:0"]
        start_tensorflow(1, 1, CONFIGS[name])
    config.experimental.set_memory_growth.assert_called_once_with("GPU:0", True)
    hidden = config.set_visible_devices.call_args_list
    assert hidden == ([] if name == "pong" else [mock.call([], "GPU")])
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
