"""`envserve doctor`: the level of each finding, and the remedy for each problem."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envserve.cli import doctor
from envserve.cli.app import PROGRAM
from envserve.errors import ProtocolMismatch
from envserve.keys.key_folder import KeyFolder
from envserve.monitoring.observer import Observer
from envserve.wire.status import ServerStatus
from tests.command_line import invoke


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a home folder with keys; stub rendering, which would start processes."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ENVSERVE_HOME", str(home))
    KeyFolder().ensure_key("client")
    monkeypatch.setattr(doctor, "_RENDERERS", {"none-such": ("Env-v0", "remedy")})
    return home


def examine(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = invoke(PROGRAM, ["doctor", "--json", *arguments])
    return result.exit_code, {each["name"]: each for each in json.loads(result.stdout)}


def test_findings_of_a_host_without_problems() -> None:
    code, found = examine()
    assert code == 0
    assert set(found) == {
        *("Python", "packages", "extras", "open files", "cores", "memory"),
        *("shared memory", "temporary folder", "port", "keys", "none-such"),
    }
    assert "gymnasium 1." in found["packages"]["text"]
    assert "libzmq 4." in found["packages"]["text"]
    assert "not installed: " in found["extras"]["text"]
    text = found["keys"]["text"]
    assert "a client key; authorised clients: 0; known server addresses: 0" in text
    assert found["none-such"]["text"] == "not installed"
    assert all(each["level"] != "warn" or each["remedy"] for each in found.values())


def test_an_extra_is_installed_if_only_packages_for_other_platforms_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requirements = [
        "numpy>=2",
        "box2d>=2; (sys_platform != 'linux') and extra == \"box2d\"",
        "there-cpu; sys_platform == 'linux' and extra == \"train\"",
        "there; sys_platform != 'linux' and extra == \"train\"",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requirements)
    installed = "there-cpu"
    monkeypatch.setattr(doctor, "_version", lambda name: "1" * (name == installed))
    (text,) = [it["text"] for it in doctor._versions() if it["name"] == "extras"]
    assert text == "train; not installed: box2d"


def test_the_version_of_tensorflow_is_found_without_importing_it() -> None:
    code = "from envserve.cli.doctor import _versions; import sys; "
    code += "print(*_versions()); assert 'tensorflow' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tensorflow" in done.stdout


def test_low_limits_of_open_files_cores_and_memory_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr("envserve.host_resources.num_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    limits = [[1 << 29], [1 << 40]]
    monkeypatch.setattr(
        "envserve.host_resources.cgroup_limits", lambda *_: iter(limits)
    )
    code, found = examine()
    assert code == 0
    assert found["open files"] == {
        "name": "open files",
        "level": "warn",
        "text": "at most 1024",
        "remedy": "allow 4096: ulimit -n, LimitNOFILE= or docker run --ulimit nofile=",
    }
    assert found["cores"]["text"].startswith("2 of 64 for workers, limited by a quota")
    assert found["memory"]["level"] == "warn"
    assert ", container limit 0.5" in found["memory"]["text"]
    assert "or raise the limit" in found["memory"]["remedy"]


def test_an_infinite_limit_of_open_files_is_not_shown_as_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, limit))
    _, found = examine()
    assert found["open files"]["text"] == "no limit"
    assert found["open files"]["level"] == "ok"


def test_without_proc_memory_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    exists = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: path != "/proc/meminfo" and exists(path)
    )
    assert "memory" not in examine()[1]


def test_a_port_in_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr("envserve.address.DEFAULT_PORT", port)
        found = doctor._port()
    assert found["text"] == f"{port}: Address already in use"
    assert found["level"] == "warn"
    assert "--bind" in found["remedy"]


def test_keys_that_others_can_read_or_change_fail(at_home: Path) -> None:
    (at_home / "client.key").chmod(0o644)
    code, found = examine()
    assert (code, found["keys"]["level"]) == (1, "fail")
    assert "client.key can be read by others (mode 0644)" in found["keys"]["text"]
    (at_home / "client.key").chmod(0o600)
    at_home.chmod(0o777)
    code, found = examine()
    assert (code, found["keys"]["level"]) == (1, "fail")
    assert "chmod 700" in found["keys"]["text"]


@pytest.mark.parametrize("name", ["clients", "servers"])
def test_a_damaged_list_of_keys_fails(at_home: Path, name: str) -> None:
    (at_home / name).write_text("ci damaged\n")
    (at_home / name).chmod(0o600)
    code, found = examine()
    assert (code, found["keys"]["level"]) == (1, "fail")
    assert f"{name}, line 1: expected" in found["keys"]["text"]


def test_an_error_of_the_system_fails_one_check_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> int:
        raise PermissionError("no memory file for you")

    monkeypatch.setattr("envserve.slab.anonymous_file", refuse)
    code, found = examine()
    assert code == 1
    assert found["shared memory"]["text"] == "no memory file for you"
    assert found["port"]["name"] == "port"


def test_a_missing_temporary_folder_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", refuse)
    code, found = examine()
    assert (code, found["temporary folder"]["level"]) == (0, "warn")
    assert "No usable temporary" in found["temporary folder"]["text"]
    assert "set TMPDIR" in found["temporary folder"]["remedy"]


@pytest.mark.parametrize(
    ("code", "level", "text"),
    [
        ("", "ok", "renders with egl"),
        ("sys.exit('no libEGL')", "warn", "cannot render: no libEGL"),
        ("import os; os.abort()", "warn", "cannot render: Command "),
        ("import time; time.sleep(60)", "warn", "rendered nothing within 0.3 s"),
    ],
)
def test_rendering_is_tried_in_another_process(
    monkeypatch: pytest.MonkeyPatch, code: str, level: str, text: str
) -> None:
    monkeypatch.setattr(doctor, "_RENDERERS", {"mujoco": ("Env-v0", "install it")})
    monkeypatch.setattr(doctor, "_version", lambda _: "1")
    monkeypatch.setattr(doctor, "_RENDER_SCRIPT", f"import sys; {code}")
    if "sleep" in code:
        monkeypatch.setattr(doctor, "_RENDER_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    found = doctor._renderer("mujoco")
    assert found["level"] == level
    assert found["text"].startswith(text)
    assert found["remedy"] == ("" if level == "ok" else "install it")


def status(monkeypatch: pytest.MonkeyPatch, reply: Any) -> None:
    def ask(_: Observer, timeout: float) -> Any:
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(Observer, "status", ask)


@pytest.fixture
def version() -> str:
    return doctor._version("envserve")


def test_a_server_of_another_release_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    status(monkeypatch, ServerStatus(version=version, total_envs=8, free_envs=5))
    code, found = examine("127.0.0.1")
    assert (code, found["tcp://127.0.0.1:5555"]["level"]) == (0, "ok")
    text = found["tcp://127.0.0.1:5555"]["text"]
    assert text.startswith(f"envserve {version}, 5 of 8 envs free, replied after ")
    status(monkeypatch, ServerStatus(version="0.0.7"))
    code, found = examine("127.0.0.1")
    assert (code, found["tcp://127.0.0.1:5555"]["level"]) == (0, "warn")
    remedy = f"this host has {version}: install the same release on both"
    assert found["tcp://127.0.0.1:5555"]["remedy"] == remedy


def test_servers_that_cannot_be_reached_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/nobody"
    code, found = examine(address, "no such host", "--timeout", "0.1")
    assert code == 1
    assert found[address]["text"] == "no server replied within 0.1 s"
    assert found[address]["remedy"] == "start a server there, or open its port"
    assert "expected an address like" in found["no such host"]["text"]
    status(monkeypatch, ProtocolMismatch(f"{address}: speaks 9 to 9"))
    code, found = examine(address)
    assert (code, found[address]["text"]) == (1, "speaks 9 to 9")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_lines_are_wrapped_to_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    text = "can be read by others " * 9
    finding = doctor._finding("keys", text, "chmod 600 them", fails=True)
    assert doctor._format(finding).count("\n") == 0  # stdout is not a terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    size = os.terminal_size((width, 24))
    # pytest calls this function, with an argument.
    monkeypatch.setattr(shutil, "get_terminal_size", lambda fallback=None: size)
    lines = doctor._format(finding).splitlines()
    assert " ".join(line[6:] for line in lines).endswith("; chmod 600 them")
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("fail  keys: can be read")
    assert all(line.startswith(" " * 6) for line in lines[1:])
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    assert doctor._format(finding).startswith("\033[31mfail  \033[0m")
