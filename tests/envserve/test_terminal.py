"""What both programs say: help, errors, version, options from files and variables."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import envserve
from envserve.cli import start as start_command
from envserve.cli.app import app as envserve_app
from envserve.cli.terminal import fail, set_up_logs
from envserve.errors import CallError
from envserve.monitoring.health_probe import HealthProblem
from envserve.settings import HostSettings
from ppo.cli.app import app as ppo_app

Run = Callable[..., tuple[int, str, str]]

PROGRAMS = {"envserve": envserve_app, "ppo": ppo_app}
#: Commands by their words, as `app` is told them.
COMMANDS = [
    (name, *words)
    for name, program in PROGRAMS.items()
    for words in [
        (),
        *(
            (group.name, command.name or command.callback.__name__)
            for group in typer.main.get_group(program).commands.values()
            for command in getattr(group, "commands", {}).values()
        ),
        *((each,) for each in typer.main.get_group(program).commands),
    ]
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(program: str, *words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ending:
            PROGRAMS[program](list(words), prog_name=program)
        out, err = capsys.readouterr()
        return int(ending.value.code or 0), out, err

    return run


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[HostSettings]:
    """What `start` would serve with, in place of serving."""
    seen: list[HostSettings] = []

    async def serve(host: HostSettings, *_: object) -> None:
        seen.append(host)

    monkeypatch.setattr("envserve.server.serve", serve)
    monkeypatch.setattr(start_command, "set_up_logs", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return seen


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_fits_and_cuts_no_name(
    command: Sequence[str], width: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "…" not in out
    group: Any = typer.main.get_group(PROGRAMS[command[0]])
    for word in command[1:]:
        group = group.commands[word]
    for param in group.params:
        if param.param_type_name == "option" and not param.hidden:
            assert re.search(rf"^  (-\w, )?{param.opts[-1]}\b", out, re.MULTILINE)
    for line in out.splitlines():
        is_name = re.match(r"  -", line)  # choices of an option stay whole
        assert len(line) <= width or is_name, line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_usage_has_each_argument_that_may_be_given(
    command: Sequence[str], run: Run
) -> None:
    usage = run(*command, "--help")[1].split("\n\n")[0]
    assert usage.startswith(f"Usage: {' '.join(command)} ")
    assert "......" not in usage
    assert "LINE" not in usage  # of `join`, which asks for it


def test_defaults_are_shown_as_they_are(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = " ".join(run("envserve", "start", "--help")[1].split())
    settings = HostSettings()
    assert f"[default: {settings.num_workers}]" in text
    assert f"[default: {settings.binds[0]}]" in text


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_says_its_version(program: str, run: Run) -> None:
    expected = f"{program} {envserve.__version__}\n"
    assert run(program, "--version") == (0, expected, "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_without_a_command_shows_its_help(program: str, run: Run) -> None:
    code, out, err = run(program)
    assert (code, err) == (2, "")
    assert out.startswith(f"Usage: {program} ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("envserve helth", "there is no command helth. Did you mean 'health'?"),
        ("envserve health", "expected the argument ADDRESS, got none; see envserve"),
        ("envserve health a b", "expected no more arguments, got b; see envserve he"),
        (
            "envserve start --wokers 1",
            "there is no option --wokers; did you mean --wor",
        ),
        ("envserve start --workers", "--workers: expected a value, got none"),
        ("envserve start --workers x", "--workers: expected a valid integer, got 'x'"),
        ("envserve start --debug-errors=x", "--debug-errors: expected no value"),
        (
            "envserve start --log-level x",
            "--log-level: expected one of 'debug', 'info'",
        ),
        (
            "envserve health a --timeout 0",
            "--timeout: expected at least 0.001, got '0'",
        ),
        ("envserve keys new me", "role: expected one of 'server', 'client', got 'me'"),
        ("ppo train --sead 1", "there is no option --sead; did you mean --seed"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: str, text: str, run: Run) -> None:
    code, out, err = run(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.lower().startswith(f"error: {text}".lower())


def test_flags_win_over_variables_which_win_over_the_file(
    tmp_path: Path,
    settings: list[HostSettings],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'workers = 3\nbind = "ipc:///from-file"\nexpose = ["a", "b"]\n'
        "insecure-no-auth = true\nmax-row-mib = 7\nstep-timeout = 2\n"
    )
    monkeypatch.setenv("ENVSERVE_WORKERS", "4")
    monkeypatch.setenv("ENVSERVE_STEP_TIMEOUT", "4.5")
    monkeypatch.setenv("ENVSERVE_BIND", "ipc:///a ipc:///b")
    words = ("--config", str(file), "--workers", "5")
    assert run("envserve", "start", *words) == (0, "", "")
    (host,) = settings
    assert host.num_workers == 5
    assert host.step_timeout_seconds == 4.5
    assert host.binds == ("ipc:///a", "ipc:///b")
    assert host.exposed == {"a", "b"}
    assert (host.insecure_no_auth, host.max_row_mib) == (True, 7)
    assert host.lease_seconds == HostSettings().lease_seconds


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("wrokers = 3", "as keys, got 'wrokers'; did you mean workers?"),
        ("num_workers = 3", "as keys, got 'num_workers'; did you mean "),
        ("workers = 'x'", "--workers: expected a valid integer, got 'x'"),
        ("workers = 0", "--workers: expected an int >= 1; got 0"),
        ("[workers]\nx = 1", "--workers: expected a valid integer, got {'x': 1}"),
        ("= 3", "expected a TOML file; Invalid statement (at line 1, column 1)"),
        (None, "expected a TOML file; [Errno 2] No such file or directory"),
    ],
)
def test_a_wrong_file_of_options_is_one_line(
    text: str | None,
    error: str,
    tmp_path: Path,
    settings: list[HostSettings],
    run: Run,
) -> None:
    file = tmp_path / "server.toml"
    if text is not None:
        file.write_text(text)
    code, _, err = run("envserve", "start", "--config", str(file))
    assert (code, err.count("\n"), settings) == (2, 1, [])
    assert err.startswith("Error: ")
    assert error in err


def test_logs_as_json_have_an_object_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    set_up_logs("info", "json")
    record = logging.LogRecord(
        "envserve.x", logging.INFO, "", 1, "%d\nthings", (2,), None
    )
    record.fields = {"lease": 3, "path": Path("a")}
    logging.root.handle(record)
    try:
        raise ValueError("no")
    except ValueError as error:
        found = (ValueError, error, error.__traceback__)
    logging.root.handle(logging.LogRecord("x", logging.ERROR, "", 1, "bad", (), found))
    with pytest.raises(typer.Exit):
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


def test_an_error_shows_its_notes_and_one_line_of_a_workers_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = CallError("call failed", remote_traceback="Traceback ...\nKeyError: 'x'\n")
    error.add_note("Go on so.")
    with pytest.raises(typer.Exit):
        fail(error, 1)
    assert capsys.readouterr().err == "Error: call failed: KeyError: 'x'\nGo on so.\n"


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        timeout=60,
        env=os.environ | variables,
        check=False,
    )


def test_a_reader_that_goes_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "envserve", "--help"]
    with open(writing, "wb") as out:
        result = subprocess.run(
            words, stdout=out, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--version >/dev/full", 1, 1),
        (">/dev/full", 2, 1),
        ("start --wokers 1 >/dev/full", 2, 1),
        ("start --wokers 1 2>/dev/full", 2, 0),
        ("health x://y 2>/dev/full", 2, 0),
        ("--version >/dev/full 2>&1", 1, 0),
        ("--version >&-", 0, 0),
        ("--version >&- 2>&-", 0, 0),
        ("start --wokers 1 2>&-", 2, 0),
        ("health x://y 2>&-", 2, 0),
    ],
)
def test_what_cannot_be_written_costs_one_line(
    words: str, code: int, said: int, unbuffered: str
) -> None:
    shell = ["sh", "-c", f'"{sys.executable}" -m envserve {words}']
    variables = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(shell, capture_output=True, timeout=300, env=variables)
    assert (done.returncode, done.stderr.count(b"\n")) == (code, said), done.stderr
    assert done.stderr.startswith(b"Error: " * said)


def test_no_locale_is_worth_a_traceback() -> None:
    result = python("-m", "envserve", "health", "\u2192", PYTHONIOENCODING="ascii")
    assert result.returncode == 2
    assert b"Traceback" not in result.stderr
    shown = python(
        "-c",
        "import typer, envserve.cli.terminal as t\n"
        "app = t.make_app('x', 'x')\n"
        "app.command('a')(lambda: print('\u2192'))\n"
        "app.command('b')(lambda: None)\n"
        "app(['a'])",
        PYTHONIOENCODING="ascii",
    )
    assert (shown.returncode, shown.stdout.strip(), shown.stderr) == (0, b"?", b"")


def test_a_shell_completes_commands_options_and_names() -> None:
    def complete(words: str) -> str:
        variables = {
            "_ENVSERVE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        return python("-m", "envserve", **variables).stdout.decode()

    assert complete("envserve hea").split() == ["health"]
    assert complete("envserve start --work").split()[0] == "--workers"
    assert complete("envserve start CartPole-v").split() == [
        "CartPole-v0",
        "CartPole-v1",
    ]


def exit_codes(program: str) -> dict[str, set[int]]:
    """Codes that the source of each command ends with, its own helpers included."""
    found: dict[str, set[int]] = {}
    for path in Path(f"{program}/cli").glob("*.py"):
        module = importlib.import_module(f"{program}.cli.{path.stem}")
        for part in ast.parse(path.read_text()).body:
            if not isinstance(part, ast.FunctionDef):
                continue
            name = path.stem if part.name.startswith("_") else part.name
            codes = found.setdefault(f"{program} {name}", set())
            for node in ast.walk(part):
                codes.update(codes_at(node, vars(module)))
    return found


def codes_at(node: ast.AST, names: dict[str, Any]) -> set[int]:
    """Codes that an expression ends a command with."""
    match node:
        case (
            ast.Call(func=ast.Name(id="fail"), args=[_, code])
            | ast.Call(func=ast.Attribute(attr="Exit"), args=[code])
        ):
            parts = [getattr(part, "value", None) for part in ast.walk(code)]
            parts += [
                names.get(n.id) for n in ast.walk(code) if isinstance(n, ast.Name)
            ]
            told = [v for p in parts for v in (p.values() if type(p) is dict else [p])]
            return {value for value in told if type(value) is int}
    return set()


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    text = Path("docs/exit-codes.md").read_text()
    rows = re.findall(r"^\| (\S+(?: \S+)?) \| (\d+) \| .+ \|$", text, re.MULTILINE)
    table = {(command, int(code)) for command, code in rows}
    assert len(table) == len(rows)
    common = {code for command, code in table if command == "all"}
    assert common == {0, 1, 2, 130}
    found = exit_codes("envserve") | exit_codes("ppo")
    found["envserve health"] |= {int(each) for each in HealthProblem}
    assert set().union(*found.values()) >= common
    own = {(command, code) for command in found for code in found[command] - common}
    assert own == {row for row in table if row[0] != "all"}
