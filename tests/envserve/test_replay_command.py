"""Options of `envserve replay`: the debugger, and videos of the last steps."""

from __future__ import annotations

import io
import math
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from envserve.cli.app import PROGRAM
from envserve.crashes.repro_file import End, Repro, encode_repro
from envserve.slab import Status
from envserve.text import install_command
from tests.command_line import Result, invoke
from tests.envserve.test_replay import make_repro
from tests.ppo.film_env import read_video

#: An env that fails on action 1, and whose frames show its step count.
FILMY_ENVS = """
import gymnasium, numpy as np
from tests.oracle.probe_envs import FaultyEnv

class FilmyEnv(FaultyEnv):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}

    def __init__(self, fault, look="frame", render_mode=None):
        super().__init__(fault)
        self.render_mode, self.look = render_mode, look

    def render(self):
        if self.render_mode is None:
            raise RuntimeError("built without render_mode")
        if self.look == "raise":
            raise RuntimeError("no canvas")
        sizes = {"frame": (16, 16), "large": (600, 600)}
        sizes["grows"] = 16 + 2 * self._steps, 16
        if self.look not in sizes:
            return self.look
        return np.full((*sizes[self.look], 3), 20 * self._steps, np.uint8)

gymnasium.register("Filmy-v0", "filmy_envs:FilmyEnv")
gymnasium.register("Blind-v0", "tests.oracle.probe_envs:FaultyEnv")
"""
RAISED = End(status=Status.ENV_ERROR, text="Traceback ...\nRuntimeError: lost balance")
HUNG = End(status=Status.TIMEOUT, text="hung")
BROKEN = End(status=Status.ENV_ERROR, text="...", is_violation=True)


def filmy_repro(fault: str, length: int = 8, **changes: Any) -> Repro:
    """Return the repro file of a renderable env that fails in its last step."""
    repro = make_repro(fault)
    actions = np.zeros(length, np.int64)
    actions[-1:] = 1
    played = replace(repro.played, actions=(actions,))
    kwargs = {"fault": fault, **changes.pop("kwargs", {})}
    return replace(
        repro, env_name="Filmy-v0", env_kwargs=kwargs, played=played, **changes
    )


@pytest.fixture
def filmy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "filmy_envs.py").write_text(FILMY_ENVS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("filmy_envs", None)
    for name in ("Filmy-v0", "Blind-v0"):
        gymnasium.registry.pop(name, None)


def replay(repro: Repro, *options: str) -> Result:
    Path("a.repro").write_bytes(encode_repro(repro))
    command = ["replay", "a.repro", "--import", "filmy_envs", *options]
    return invoke(PROGRAM, command)


@pytest.mark.parametrize(
    ("fault", "end"),
    [("raise", RAISED), ("segfault", make_repro().end), ("nan", BROKEN)],
)
def test_a_film_shows_the_last_steps_before_the_crash(
    filmy: Path, fault: str, end: End
) -> None:
    repro = filmy_repro(fault, end=end)  # recorded without render_mode
    result = replay(repro, "--film", "film.mp4", "--last", "5")
    assert "film.mp4: 5 frames" in result.output
    assert "\nreproduced in action 8" in result.output
    assert result.exit_code == 0
    seen = read_video(filmy / "film.mp4", 16, 16).mean(axis=(1, 2, 3))
    # The video has the frames from just before action 4 to the last action.
    np.testing.assert_allclose(seen, 20 * np.arange(3, 8), atol=4)


def test_a_film_of_a_hang_ends_where_it_hangs(filmy: Path) -> None:
    repro = filmy_repro("hang", end=HUNG, timeout_seconds=20.0)
    result = replay(repro, "--film", "film.gif", "--timeout", "5")
    assert result.exit_code == 0
    assert "reproduced in action 8: hung for 5 s" in result.output
    assert len(read_video(filmy / "film.gif", 16, 16)) == 8


def test_frames_may_have_more_than_a_megabyte(filmy: Path) -> None:
    repro = filmy_repro("raise", end=RAISED, kwargs={"look": "large"})
    result = replay(repro, "--film", "film.mp4", "--last", "1")
    assert "film.mp4: 1 frames" in result.output
    assert result.exit_code == 0


def test_a_film_of_an_env_that_no_longer_crashes_includes_its_end(filmy: Path) -> None:
    result = replay(filmy_repro("none", end=RAISED), "--film", "film.mp4")
    assert result.exit_code == 1
    assert "not reproduced: did not crash in 8 actions" in result.output
    assert len(read_video(filmy / "film.mp4", 16, 16)) == 9


@pytest.mark.parametrize(
    ("look", "code", "text"),
    [
        (
            "none",
            1,
            "expected render() to return a frame, uint8 [height, width, 3]; got",
        ),
        ("raise", 1, "got RuntimeError('no canvas'); the env must support"),
        (
            "grows",
            2,
            "film.mp4: expected a frame of shape (16, 16, 3), as before; got (18, 1",
        ),
    ],
)
def test_frames_that_cannot_be_filmed_are_an_error(
    filmy: Path, look: str, code: int, text: str
) -> None:
    repro = filmy_repro("raise", end=RAISED, kwargs={"look": look})
    result = replay(repro, "--film", "film.mp4")
    assert result.exit_code == code
    assert text in result.output
    assert "Traceback" not in result.output
    assert not list(filmy.glob("film.*"))


def test_an_error_names_an_env_without_the_argument_render_mode(filmy: Path) -> None:
    repro = replace(filmy_repro("raise", end=RAISED), env_name="Blind-v0")
    result = replay(repro, "--film", "film.mp4")
    assert result.exit_code == 1
    assert "'render_mode'; Blind-v0 takes fault" in result.output


@pytest.mark.parametrize("options", [(), ("--pdb",), ("--film", "film.gif")])
@pytest.mark.parametrize("text", ["import nothing_like_it", "raise SystemExit(3)"])
def test_modules_that_cannot_be_imported_are_wrong_input(
    filmy: Path, text: str, options: tuple[str, ...]
) -> None:
    (filmy / "filmy_envs.py").write_text(text)
    result = replay(filmy_repro("raise", end=RAISED), *options)
    assert result.exit_code == 2
    assert "filmy_envs" in result.output
    assert "reproduced in" not in result.output


def test_missing_video_libraries_are_reported_before_anything_starts(
    filmy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repro = filmy_repro("raise")
    assert "ending in .mp4 or .gif" in replay(repro, "--film", "film.avi").output
    assert "got both" in replay(repro, "--film", "film.mp4", "--pdb").output
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setenv("PATH", "")
    result = replay(repro, "--film", "film.mp4")
    assert result.exit_code == 2
    assert install_command("video") in result.output


def debug(
    monkeypatch: pytest.MonkeyPatch, repro: Repro, *commands: str
) -> tuple[int, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{c}\n" for c in commands)))
    output = io.StringIO()
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setattr("sys.stderr", output)
    Path("a.repro").write_bytes(encode_repro(repro))
    command = ["replay", "a.repro", "--import", "filmy_envs", "--pdb"]
    with pytest.raises(SystemExit) as caught:
        PROGRAM.main(command)
    assert isinstance(caught.value.code, int)
    return caught.value.code, output.getvalue()


@pytest.mark.parametrize(
    ("fault", "end"), [("segfault", make_repro().end), ("hang", HUNG), ("nan", BROKEN)]
)
def test_the_debugger_stops_before_a_crash_that_ends_the_process(
    filmy: Path, monkeypatch: pytest.MonkeyPatch, fault: str, end: End
) -> None:
    shown = ("p self._steps", "p int(action)", "q")
    code, text = debug(monkeypatch, filmy_repro(fault, end=end), *shown)
    assert code == 0
    assert "n runs a line" in text
    assert "probe_envs.py" in text
    assert "-> self._steps += 1" in text  # the first line of `step`
    assert "(Pdb) 7\n(Pdb) 1\n" in text  # the state before the crash, and the action


def test_the_debugger_runs_the_commands_of_the_home_folder_only(
    filmy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(filmy / "home"))
    Path("home").mkdir()
    Path("home/.pdbrc").write_text("p 'of your' ' own'\n")
    Path(".pdbrc").write_text("p 'of the working' ' directory'\n")  # a stranger's
    code, text = debug(monkeypatch, filmy_repro("nan", end=BROKEN), "q")
    assert code == 0
    assert "of your own" in text
    assert "of the working directory" not in text


def test_a_violation_is_reported_after_its_step_in_the_debugger(
    filmy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repro = filmy_repro("nan", end=BROKEN)
    code, text = debug(monkeypatch, repro, "c")
    assert code == 0
    assert "expected observation to be finite" in text


def test_the_debugger_stops_in_a_reset_that_crashes(
    filmy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repro = filmy_repro("none", 0, end=HUNG)
    code, text = debug(monkeypatch, repro, "q")
    assert code == 0
    assert "-> self, *, seed" in text or "-> super().reset(seed=seed)" in text


def test_the_debugger_exits_if_nothing_crashes(
    filmy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = debug(monkeypatch, filmy_repro("none", end=RAISED))
    assert code == 1
    assert "the env did not crash" in text


def test_the_debugger_opens_where_an_exception_was_raised(filmy: Path) -> None:
    Path("a.repro").write_bytes(encode_repro(filmy_repro("raise", end=RAISED)))
    ours, theirs = pty.openpty()
    command = ["replay", "a.repro", "--import", "filmy_envs", "--pdb"]
    with subprocess.Popen(
        [sys.executable, "-m", "envserve", *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        output = b""
        try:
            for typed in (b"up\n", b"p self._steps, int(action)\n", b"q\n"):
                while not output.endswith(b"(Pdb) "):
                    output += os.read(ours, 4096)
                os.write(ours, typed)
                output += typed
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(ours)
    text = output.decode()
    assert "RuntimeError: the simulator lost its balance" in text
    assert "-> FAILURES[self._fault](math.inf)" in text
    assert "(8, 1)" in text


def test_the_debugger_opens_where_an_earlier_step_raises(
    filmy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repro = filmy_repro("raise", end=HUNG)
    (actions,) = repro.played.actions
    actions[2] = 1  # the third of eight actions
    code, text = debug(monkeypatch, repro, "up", "p self._steps", "q")
    assert code == 0
    assert "RuntimeError: the simulator lost its balance" in text
    assert "(Pdb) 3\n" in text


@pytest.mark.parametrize("options", [(), ("--pdb",)])
def test_text_in_a_repro_file_is_escaped(filmy: Path, options: tuple[str, ...]) -> None:
    text = "\x1b[2J\u202e\x07"
    end = End(status=Status.ENV_ERROR, text=f"{text}\n{text}")
    changes: dict[str, Any] = {"import_modules": (text,), "timeout_seconds": 9e8}
    for repro in (
        filmy_repro("raise", end=end, kwargs={text: 1}, **changes),
        replace(filmy_repro("raise", end=end, **changes), env_name=text),
    ):
        shown = replay(repro, *options).output
        assert {"\x1b", "\u202e", "\x07"}.isdisjoint(shown)
        assert text.encode("unicode_escape").decode() in shown


def test_a_long_timeout_is_accepted(filmy: Path) -> None:
    repro = filmy_repro("raise", end=RAISED, timeout_seconds=math.inf)
    assert replay(repro).exit_code == 0
    assert replay(repro, "--timeout", "1e300").exit_code == 0
