"""Both programs' command lines: help, errors, values, streams and exit codes."""

from __future__ import annotations

import ast
import gc
import importlib
import io
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

import envserve
from envserve import python_process
from envserve.cli import start as start_command
from envserve.cli.app import PROGRAM as ENVSERVE
from envserve.cli.logs import set_up_logs
from envserve.cli.program import Fields, Program, options_of, parse
from envserve.cli.terminal import fail, keyboard
from envserve.client.link.connection import Connection
from envserve.crashes.repro_file import encode_repro
from envserve.errors import CallError, ConnectError, EnvStartError
from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.monitoring.health_probe import HealthProblem
from envserve.python_process import build_commit, uncollected_imports
from envserve.settings import HostSettings
from ppo.cli.app import PROGRAM as PPO
from tests.command_line import invoke
from tests.envserve.test_replay import make_repro

Run = Callable[..., tuple[int, str, str]]

PROGRAMS = {each.name: each for each in (ENVSERVE, PPO)}
#: The words that run both programs, their commands, and those of `envserve keys`.
COMMANDS = [
    (program.name, *name.split())
    for program in PROGRAMS.values()
    for name in ["", *program.names]
] + [("envserve", "keys")]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(program: str, *words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ending:
            PROGRAMS[program].main(words)
        out, err = capsys.readouterr()
        return int(ending.value.code or 0), out, err

    return run


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[HostSettings]:
    """Make `start` append its settings to a list instead of serving."""
    received: list[HostSettings] = []

    async def serve(host: HostSettings, *_: object) -> None:
        received.append(host)

    monkeypatch.setattr("envserve.server.serve", serve)
    monkeypatch.setattr(start_command, "set_up_logs", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return received


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_the_terminal_and_truncates_no_name(
    command: Sequence[str], width: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "…" not in out
    name = " ".join(command[1:])
    if name in PROGRAMS[command[0]].names:
        for each in options_of(PROGRAMS[command[0]].command(name)):
            if each.flag and each.help:
                assert re.search(rf"^  {each.flag}\b", out, re.MULTILINE)
    for line in out.splitlines():
        is_name = re.match(r"  -", line)  # an option's choices are not wrapped
        assert len(line) <= width or is_name, line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_usage_begins_with_the_command(command: Sequence[str], run: Run) -> None:
    usage = run(*command, "--help")[1].split("\n\n")[0]
    assert usage.startswith(f"usage: {' '.join(command)} ")
    assert "......" not in usage
    assert "LINE" not in usage  # `join` prompts for its line


def test_help_shows_defaults(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = " ".join(run("envserve", "start", "--help")[1].split())
    settings = HostSettings()
    assert "one per core. --gpus" in text  # not the number of this host
    assert f"[default: {settings.lease_seconds}]" in text
    assert "0 means unlimited. [default: 0]" in text
    assert f"[default: {settings.binds[0]}]" in text


@pytest.mark.parametrize("command", ["invite", "keys make"])
def test_help_marks_required_options(command: str, run: Run) -> None:
    text = " ".join(run("envserve", *command.split(), "--help")[1].split())
    assert "tcp://HOST:PORT; repeatable. [required]" in text
    assert text.count("[required]") == 1


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_its_version(program: str, run: Run) -> None:
    commit = f" (commit {found})" if (found := build_commit()) else ""
    expected = f"{program} {envserve.__version__}{commit}\n"
    assert run(program, "--version") == (0, expected, "")


def test_the_commit_is_that_of_the_clone_or_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\necho $1 $2 $3 $4 $5\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(python_process, "clone_folder", lambda: tmp_path)
    monkeypatch.setattr(python_process, "__file__", str(tmp_path / "x.py"))
    assert build_commit() == ""
    (tmp_path / "commit.txt").write_text("1a2b3c4\n")
    assert build_commit() == "1a2b3c4"
    (tmp_path / ".git").touch()
    assert build_commit() == f"-C {tmp_path} rev-parse --short HEAD"
    git.write_text("#!/bin/sh\nexit 128\n")
    assert build_commit() == ""
    monkeypatch.setattr(python_process, "clone_folder", lambda: None)
    assert build_commit() == "1a2b3c4"


def test_imported_modules_are_excluded_from_garbage_collection() -> None:
    before = gc.get_freeze_count()
    with uncollected_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_a_command_shows_its_help(program: str, run: Run) -> None:
    code, out, err = run(program)
    assert (code, err) == (2, "")
    assert out.startswith(f"usage: {program} ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("envserve helth", "there is no command helth; did you mean health?"),
        ("envserve stop", "there is no command stop; did you mean drain?"),
        ("envserve serve x", "there is no command serve; did you mean start?"),
        ("ppo run cartpole", "there is no command run; did you mean train?"),
        ("envserve keys mak", "there is no command keys mak; did you mean keys make?"),
        ("envserve --verson", "there is no command --verson; did you mean --version?"),
        ("envserve describe", "the following arguments are required: ENV; see envser"),
        ("envserve health a b", "unrecognized arguments: b; see envserve health --he"),
        (
            "envserve start --wokers 1",
            "there is no option --wokers; did you mean --workers? See",
        ),
        ("envserve start --work 1", "there is no option --work; did you mean --work"),
        (
            "envserve start --num-workers 1",
            "there is no option --num-workers; did you mean --workers? See",
        ),
        (
            "envserve start --host x",
            "there is no option --host; did you mean --bind? See",
        ),
        (
            "envserve start --port 1",
            "there is no option --port; did you mean --bind? See",
        ),
        ("envserve start --workers", "argument --workers: expected one argument; see"),
        ("envserve start --workers x", "--workers: expected an int; got 'x'; see env"),
        (
            "envserve start --debug-errors=x",
            "--debug-errors: expected no value; got 'x",
        ),
        (
            "envserve start --log-level x",
            "--log-level: expected one of debug, info, warning, error; got 'x'",
        ),
        (
            "envserve health a --timeout 0",
            "--timeout: expected a number >= 0.001; got '0'; see envserve health",
        ),
        (
            "envserve replay x --timeout nan",
            "--timeout: expected a number >= 0.001; got 'nan'; see envserve replay",
        ),
        ("envserve health tcp:/x", "expected an address like sim1, sim1:5555, tcp://"),
        ("envserve envs tcp:/x", "expected an address like sim1, sim1:5555, tcp://"),
        ("envserve keys new me", "ROLE: expected one of server, client; got 'me'; se"),
        ("envserve invite me", "the following arguments are required: --at; see envs"),
        ("ppo train --sead 1", "there is no option --sead; did you mean --seed"),
        (
            "envserve demo --no-browser",
            "there is no option --no-browser; did you mean --no-open? See",
        ),
        (
            "envserve page --browser",
            "there is no option --browser; did you mean --open? See",
        ),
        (
            "ppo train --num-envs=4",
            "there is no option --num-envs; did you mean --set num_envs=4? See",
        ),
        (
            "ppo train --step-timeout=4",
            "there is no option --step-timeout; did you mean --set step_timeout",
        ),
        (
            "ppo train --workers 2",
            "there is no option --workers; did you mean --num-workers? See",
        ),
    ],
)
def test_a_wrong_command_line_is_an_error_of_one_line(
    words: str, text: str, run: Run
) -> None:
    code, out, err = run(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.lower().startswith(f"error: {text}".lower())


def test_the_command_line_overrides_variables_which_override_the_file(
    tmp_path: Path,
    settings: list[HostSettings],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'workers = 3\nbind = "ipc:///from-file"\nexpose = ["a", "b"]\n'
        "insecure-no-auth = true\nmax-row-mib = 7\nstep-timeout = 2\n",
        "utf-8-sig",  # with a byte order mark
    )
    monkeypatch.setenv("ENVSERVE_WORKERS", "4")
    monkeypatch.setenv("ENVSERVE_STEP_TIMEOUT", ".5")
    monkeypatch.setenv("ENVSERVE_BIND", "ipc:///a ipc:///b")
    words = ("--config", str(file), "--workers", "5")
    assert run("envserve", "start", *words) == (0, "", "")
    (host,) = settings
    assert host.num_workers == 5
    assert host.step_timeout_seconds == 0.5
    assert host.binds == ("ipc:///a", "ipc:///b")
    assert host.exposed == {"a", "b"}
    assert (host.insecure_no_auth, host.max_row_mib) == (True, 7)
    assert host.lease_seconds == HostSettings().lease_seconds


def test_an_argument_overrides_a_variable_and_a_file(
    tmp_path: Path,
    settings: list[HostSettings],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('env = ["Acrobot-v1"]')
    config = ("--config", str(file))
    monkeypatch.setenv("ENVSERVE_ENV", "Pendulum-v1 Taxi-v4")
    assert run("envserve", "start", "CartPole-v1", *config)[0] == 0
    assert run("envserve", "start", "A-v0", "--env", "B-v0", *config)[0] == 0
    assert run("envserve", "start", *config)[0] == 0
    monkeypatch.delenv("ENVSERVE_ENV")
    assert run("envserve", "start", "CartPole-v1", *config)[0] == 0
    first = parse(start_command.start, ["A-v0", *config], "envserve start")["given"]
    assert first.words("config") == ["A-v0"]
    assert [host.env_names for host in settings] == [
        *(("CartPole-v1",), ("A-v0", "B-v0"), ("Pendulum-v1", "Taxi-v4")),
        ("CartPole-v1",),
    ]


def test_variables_can_set_all_options_of_a_server_except_those_for_ray() -> None:
    options = options_of(start_command.start)
    without = {option.flag for option in options if not option.variable}
    on_ray = {"--on", "--servers", "--scale-to", "--resources"}
    assert without == {"", "--config"} | on_ray  # the argument has no flag


@pytest.mark.parametrize(
    ("words", "variable", "text", "preload"),
    [
        ([], "", "", True),
        (["--no-preload"], "", "", False),
        ([], "true", "", False),
        ([], "false", "", True),
        ([], "", "no-preload = true", False),
        (["--no-preload"], "false", "no-preload = false", False),
    ],
)
def test_a_flag_disables_what_is_on_by_default(
    tmp_path: Path,
    settings: list[HostSettings],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    variable: str,
    text: str,
    preload: bool,
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    monkeypatch.setenv("ENVSERVE_NO_PRELOAD", variable)
    assert run("envserve", "start", "--config", str(file), *words) == (0, "", "")
    assert [host.preload for host in settings] == [preload]


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        (["--no-preload", "--reload"], ["--reload", "--no-preload"]),
        (["--workers", "3"], ["--workers", "3"]),
    ],
)
def test_given_options_can_be_passed_on_as_words(
    words: list[str], passed_on: list[str]
) -> None:
    given = parse(start_command.start, words, "envserve start")["given"]
    assert given.words() == passed_on


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("wrokers = 3", "as keys; got 'wrokers'; did you mean workers?"),
        ("num_workers = 3", "as keys; got 'num_workers'; did you mean "),
        ("config = 'x'", "as keys; got 'config'"),
        ("workers = 'x'", "server.toml: workers: expected an int; got 'x'"),
        ("workers = 0", "server.toml: workers: expected an int >= 1; got 0"),
        ("[workers]\nx = 1", "toml: workers: expected an int; got {'x': 1}"),
        ("= 3", "expected a TOML file; Invalid statement (at line 1, column 1)"),
        ("a = " + "[" * 100_000, "expected a TOML file; maximum recursion depth"),
        (None, "expected a TOML file; [Errno 2] No such file or directory"),
    ],
)
def test_a_wrong_file_of_options_is_an_error_of_one_line(
    text: str | None, error: str, tmp_path: Path, settings: list[HostSettings], run: Run
) -> None:
    file = tmp_path / "server.toml"
    if text is not None:
        file.write_text(text)
    code, _, err = run("envserve", "start", "--config", str(file))
    assert (code, err.count("\n"), settings) == (2, 1, [])
    assert err.startswith("Error: ")
    assert error in err


def test_a_wrong_variable_is_an_error_that_names_the_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVSERVE_WORKERS", "x")
    code, _, err = run("envserve", "start")
    text = "Error: environment variable ENVSERVE_WORKERS: expected an int; got 'x'; se"
    assert (code, err[: len(text)]) == (2, text)


def test_unknown_variables_of_a_server_are_one_warning(
    settings: list[HostSettings],
    run: Run,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("WORKRES", "NUM_WORKERS", "HOME", "LOG_FORMAT", "QQ", "STEP_TIMEOUT"):
        monkeypatch.setenv(f"ENVSERVE_{name}", "text" if name == "LOG_FORMAT" else "3")
    assert run("envserve", "start") == (0, "", "")
    assert caplog.messages == [
        "ignoring unknown environment variables: "
        "ENVSERVE_NUM_WORKERS (did you mean ENVSERVE_WORKERS?), ENVSERVE_QQ, "
        "ENVSERVE_WORKRES (did you mean ENVSERVE_WORKERS?)"
    ]


def test_variables_of_kubernetes_services_are_ignored(
    settings: list[HostSettings],
    run: Run,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for service in ("ENVSERVE", "ENVSERVE_METRICS"):
        monkeypatch.setenv(f"{service}_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv(f"{service}_SERVICE_PORT_HTTP", "5555")
        for name in ("PORT", "PORT_5555_TCP", "PORT_5555_TCP_ADDR"):
            monkeypatch.setenv(f"{service}_{name}", "tcp://10.0.0.1:5555")
    monkeypatch.setenv("ENVSERVE_WORKERS", "3")
    assert run("envserve", "start") == (0, "", "")
    monkeypatch.setenv("ENVSERVE_METRICS_PORT", "9123")  # set by the user
    assert run("envserve", "start") == (0, "", "")
    assert caplog.messages == []
    assert [host.num_workers for host in settings] == [3, 3]
    assert [host.metrics_port for host in settings] == [None, 9123]


def test_json_logs_have_one_object_per_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    set_up_logs("info", "json")
    record = logging.LogRecord(
        "envserve.x", logging.INFO, "", 1, "%d\nthings", (2,), None
    )
    record.fields = {"lease": 3, "path": Path("a"), "message": "not this"}
    logging.root.handle(record)
    try:
        raise ValueError("no")
    except ValueError as error:
        found = (ValueError, error, error.__traceback__)
    logging.root.handle(logging.LogRecord("x", logging.ERROR, "", 1, "bad", (), found))
    with pytest.raises(SystemExit):
        fail("expected this, got that", 1)
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "envserve.x",
        "message": "2\nthings",
        "lease": 3,
        "path": "a",
    }
    assert second["exception"].splitlines()[-1] == "ValueError: no"
    assert third["message"] == "expected this, got that"


def test_an_error_shows_its_notes_and_one_line_and_the_hint_of_a_workers_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    frame = 'Traceback:\n  File "f.py", line 1, in f\n'
    traceback = f"{frame}KeyError: 1\nmore\nHint: use y.\n"
    error = CallError("call failed", remote_traceback=traceback)
    error.add_note("A note.")
    with pytest.raises(SystemExit):
        fail(error, 1)
    expected = "Error: call failed: KeyError: 1 (f.py:1)\nHint: use y.\nA note.\n"
    assert capsys.readouterr().err == expected


def test_an_error_of_an_env_shows_the_last_place_in_the_users_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = ("my_env.py", "my_sim.py", "/venv/lib/python3.11/core.py")
    frames = "Traceback (most recent call last):\n" + "".join(
        f'  File "{place}", line {number}, in step\n    x()\n'
        for number, place in enumerate(places, 1)
    )
    shown = []
    for text in (frames, "\n".join(["Traceback:", *frames.splitlines()[-2:], ""])):
        error = EnvStartError("failed", remote_traceback=f"{text}ValueError: odd\n")
        with pytest.raises(SystemExit):
            fail(error, 1)
        shown.append(capsys.readouterr().err)
    assert shown == [
        "Error: failed: ValueError: odd (my_sim.py:2)\n",
        "Error: failed: ValueError: odd (/venv/lib/python3.11/core.py:3)\n",
    ]


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        timeout=60,
        env=os.environ | variables,
        check=False,
    )


@pytest.mark.parametrize("words", [("--help",), ("replay", "a.repro")])
def test_a_closed_pipe_is_not_reported_as_an_error(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.repro").write_bytes(encode_repro(make_repro()))
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as out:
        result = subprocess.run(
            [sys.executable, "-m", "envserve", *words],
            stdout=out,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
@pytest.mark.parametrize(
    ("words", "code", "num_lines", "unbuffered"),
    [
        ("--version >/dev/full", 1, 1, ""),
        ("--version >/dev/full", 1, 1, "1"),
        (">/dev/full", 2, 1, "1"),
        ("start --wokers 1 >/dev/full", 2, 1, ""),
        ("start --wokers 1 2>/dev/full", 2, 0, ""),
        ("health x://y 2>/dev/full", 2, 0, ""),
        ("--version >/dev/full 2>&1", 1, 0, ""),
        ("--version >&-", 0, 0, ""),
        ("--version >&- 2>&-", 0, 0, "1"),
        ("start --wokers 1 2>&-", 2, 0, ""),
        ("health x://y 2>&-", 2, 0, ""),
        ("join <&-", 2, 1, ""),
        ("describe CartPole-v1 >&- 2>&- <&-", 0, 0, ""),
    ],
)
def test_an_unwritable_stream_causes_at_most_one_line(
    words: str, code: int, num_lines: int, unbuffered: str
) -> None:
    shell = ["sh", "-c", f'"{sys.executable}" -m envserve {words}']
    variables = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(shell, capture_output=True, timeout=300, env=variables)
    assert (done.returncode, done.stderr.count(b"\n")) == (code, num_lines), done.stderr
    assert done.stderr.startswith(b"Error: " * num_lines)


def test_characters_that_cannot_be_encoded_cause_no_traceback() -> None:
    result = python("-m", "envserve", "health", "\u2192", PYTHONIOENCODING="ascii")
    assert result.returncode == 2
    assert b"Traceback" not in result.stderr
    shown = python(
        "-c",
        "import envserve.cli.status as status, envserve.cli.app as app\n"
        "status.status = lambda: print('\u2192')\n"
        "app.PROGRAM.main(['status'])",
        PYTHONIOENCODING="ascii",
    )
    assert (shown.returncode, shown.stdout.strip(), shown.stderr) == (0, b"?", b"")


def complete(program: str, line: str, *arguments: str, **variables: str) -> list[str]:
    """Return the completions of a line's last word."""
    variables |= {f"_{program.upper()}_COMPLETE": "1", "COMP_LINE": line}
    return invoke(PROGRAMS[program], arguments, env=variables).stdout.split()


def test_a_shell_completes_commands_options_and_values() -> None:
    assert complete("envserve", "envserve hea") == ["health"]
    assert complete("envserve", "envserve hea more", COMP_POINT="12") == ["health"]
    assert complete("envserve", "envserve keys ") == ["make", "new"]
    assert complete("envserve", "") == complete("envserve", "envserve ")
    assert complete("envserve", "envserve --ver") == ["--version"]
    options = ["--worker-env", "--worker-memory-mib", "--worker-processes"]
    options += ["--worker-user", "--workers"]
    assert complete("envserve", "envserve start --work") == options
    names = ["CartPole-v0", "CartPole-v1"]
    assert complete("envserve", "envserve start CartPole-v") == names
    assert complete("envserve", "envserve start --env CartPole-v") == names
    assert complete("envserve", "envserve start --workers ") == []
    assert complete("envserve", "envserve start --log-format ") == ["json", "text"]
    assert complete("envserve", "envserve check --env CartPole-v") == names
    assert complete("ppo", "ppo train --re") == [
        "--rendezvous-timeout",
        "--resources",
        "--restartable",
        "--resume",
    ]
    assert complete("ppo", "ppo train che") == ["cheetah", "cheetah-sac"]
    assert complete("ppo", "ppo train CartPole-v") == names
    assert complete("ppo", "ppo configs acro") == ["acrobot"]


def test_a_shell_completes_joined_servers_and_clients(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    folder.add_pin(["tcp://sim1:5555", "tcp://sim2:7000"], bytes(32), "me")
    folder.add_pin(["tcp://*:5555"], bytes(32), "me")
    folder.clients.add(Grant(name="ann", public=bytes(32)), 0.0)
    home = {"ENVSERVE_HOME": str(tmp_path)}
    for command in ("status", "top", "page", "health", "drain", "check", "envs"):
        words = complete("envserve", f"envserve {command} s", **home)
        assert words == ["sim1", "sim2:7000"], command
    # Bash replaces only the part after a colon.
    for line, replaced, number in (
        ("envserve status sim2:", "", "7000"),
        ("envserve status sim2:7", "7", "7000"),
        ("envserve status sim2", "sim2", "sim2:7000"),
    ):
        bash_arguments = "envserve", replaced, "status"
        assert complete("envserve", line, *bash_arguments, **home) == [number]
    assert complete("envserve", "envserve clients ", **home) == ["ann", "remove"]
    (tmp_path / "servers").write_text("what?")
    assert complete("envserve", "envserve status s", **home) == []


@pytest.mark.parametrize("command", ["status", "health", "drain", "check"])
def test_the_default_server_is_that_of_this_host(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(_: object, address: str, **more: object) -> None:
        asked.append(address)
        raise ConnectError(f"{address}: connection refused")

    monkeypatch.setattr(Connection, "__init__", refuse)
    assert run("envserve", command)[0] == 1
    assert asked == ["tcp://127.0.0.1:5555"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_code_is_shown_and_installed_once(
    shell: str, tmp_path: Path
) -> None:
    variables = {"SHELL": f"/bin/{shell}", "HOME": str(tmp_path)}
    code = invoke(PPO, ["--show-completion"], env=variables).stdout
    assert "_PPO_COMPLETE=1" in code
    for _ in range(2):
        done = invoke(PPO, ["--install-completion"], env=variables)
        assert done.exit_code == 0, done.stderr
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.read_text() == code
    assert str(file) in done.stdout


def test_a_script_that_has_read_from_stdin_can_run_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert sys.stdin.readline() == "one\n"
    with pytest.raises(SystemExit, match=r"^0$"):
        ENVSERVE.main(["--version"])
    assert sys.stdin.readline() == "two\n"


def test_completion_is_appended_to_the_startup_file(tmp_path: Path) -> None:
    (file := tmp_path / ".bashrc").write_bytes(b"# caf\xe9")  # not UTF-8
    variables = {"SHELL": "/bin/bash", "HOME": str(tmp_path)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))  # like a full disk
    try:
        done = invoke(PPO, ["--install-completion"], env=variables)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert (
        f"{file} cannot be changed: File too large; add to it: complete" in done.stderr
    )
    assert file.read_bytes() == b"# caf\xe9"
    assert invoke(PPO, ["--install-completion"], env=variables).exit_code == 0
    code = invoke(PPO, ["--show-completion"], env=variables).stdout
    assert file.read_bytes() == b"# caf\xe9\n" + code.encode()


def test_bash_completes_with_the_code_that_it_is_given() -> None:
    # Like readline: bash runs the command of `complete -C`, which prints candidates.
    code = python("-m", "envserve", "--show-completion", SHELL="bash").stdout.decode()
    command = re.findall("'(.*)'", code)[0].replace(
        " envserve", f" {sys.executable} -m envserve"
    )
    script = f"{code}\ncomplete -p envserve\nCOMP_LINE='envserve dra' {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "drain", done.stderr


def test_an_unknown_shell_is_an_error() -> None:
    done = invoke(PPO, ["--show-completion"], env={"SHELL": "/bin/tcsh"})
    assert (done.exit_code, done.stdout) == (2, "")
    assert "SHELL: expected the path of bash, zsh, fish; got 'tcsh'" in done.stderr


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A command's options."""

    max_envs: int = 3
    """Maximum number of envs."""
    names: tuple[str, ...] = ()
    """Names, which are
    many."""


def measure(
    env: str,
    files: list[Path] | None = None,
    *,
    rate: dict[str, float] | None = None,
    open_: bool = False,
    unseen: bool = False,
    limits: Annotated[dict[str, Any], Fields(Limits)],
) -> None:
    """Measure 100 % of an env.

    Args:
      env: Env to measure.
      files: Files, over
        two lines.
      rate: Rates.
      open_: Open it.
    """


def test_a_field_with_a_docstring_is_an_option_with_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(measure, ["-h"], "measure")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "usage: measure [OPTIONS] ENV [FILES]..." in lines
    assert "--max-envs INT Maximum number of envs. [default: 3]" in lines
    assert "--names TEXT Names, which are many." in lines
    assert "Measure 100 % of an env." in lines
    assert "FILES Files, over two lines." in lines
    assert "--open Open it." in lines
    assert not any("unseen" in line for line in lines)


def test_arguments_may_be_between_options() -> None:
    words = ["--names", "x", "a", "--rate", '{"b": 2}', "c", "--names=y", "--", "--d"]
    assert parse(measure, words, "measure") == {
        "env": "a",
        "files": [Path("c"), Path("--d")],
        "rate": {"b": 2.0},
        "limits": {"names": ("x", "y")},
    }
    assert parse(measure, ["a"], "measure") == {"env": "a", "limits": {}}


def exit_codes(program: Program) -> dict[str, set[int]]:
    """Return the exit codes in the source of each command module."""
    found: dict[str, set[int]] = {}
    for name in {name.split()[0] for name in program.names}:
        module = importlib.import_module(f"{program.name}.cli.{name}")
        codes = found.setdefault(f"{program.name} {name}", set())
        for part in ast.parse(Path(str(module.__file__)).read_text()).body:
            if isinstance(part, ast.FunctionDef):
                returns = {"int"} == {getattr(part.returns, "id", "")}
                for node in ast.walk(part):
                    codes.update(codes_at(node, vars(module), is_code=returns))
    return found


def codes_at(node: ast.AST, names: dict[str, Any], *, is_code: bool) -> set[int]:
    """Return the exit codes that a call to `fail` or a return statement sets."""
    match node:
        case (
            ast.Call(func=ast.Name(id="fail"), args=[_, code])
            | ast.Call(func=ast.Name(id="SystemExit"), args=[code])
        ):
            pass
        case ast.Return(value=ast.expr() as code) if is_code:
            pass
        case _:
            return set()
    parts = [getattr(part, "value", None) for part in ast.walk(code)]
    parts += [names.get(n.id) for n in ast.walk(code) if isinstance(n, ast.Name)]
    values = [v for p in parts for v in (p.values() if type(p) is dict else [p])]
    return {value for value in values if type(value) is int}


def test_the_documented_exit_codes_match_the_code() -> None:
    text = Path("docs/exit-codes.md").read_text()
    rows = re.findall(r"^\| (\S+(?: \S+)?) \| (\d+) \| .+ \|$", text, re.MULTILINE)
    table = {(command, int(code)) for command, code in rows}
    assert len(table) == len(rows)
    common = {code for command, code in table if command == "all"}
    assert common == {0, 1, 2, 130}
    found = exit_codes(ENVSERVE) | exit_codes(PPO)
    found["envserve health"] |= {int(each) for each in HealthProblem}
    assert set().union(*found.values()) >= common
    special = {(command, c) for command in found for c in found[command] - common}
    assert special == {row for row in table if row[0] != "all"}


def test_the_terminal_is_restored_after_sigterm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller, terminal = os.openpty()
    handler = signal.getsignal(signal.SIGTERM)
    with open(controller, "wb"), open(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        settings = termios.tcgetattr(stdin)

        def wait_for_sigterm() -> None:
            with keyboard() as wait_for_keys:
                assert termios.tcgetattr(stdin) != settings
                assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
                signal.raise_signal(signal.SIGTERM)
                wait_for_keys(10.0)

        with pytest.raises(KeyboardInterrupt):
            wait_for_sigterm()
        assert termios.tcgetattr(stdin) == settings
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_command_in_the_background_is_not_stopped() -> None:
    code = """if True:
        import os, pty, signal
        from envserve.cli.terminal import keyboard

        session, _ = pty.fork()  # the child leads a session with its own terminal
        if session:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(session, 0)[1]))
        background = os.fork()
        if not background:
            os.setpgid(0, 0)  # as a shell does for `command &`
            with keyboard() as wait_for_keys:
                os._exit(wait_for_keys(0.0) != "")
        _, status = os.waitpid(background, os.WUNTRACED)
        is_stopped = os.WIFSTOPPED(status)
        if is_stopped:
            os.kill(background, signal.SIGKILL)
        os._exit(is_stopped or os.waitstatus_to_exitcode(status))
    """
    subprocess.run([sys.executable, "-c", code], check=True)
