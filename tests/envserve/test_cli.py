"""The `envserve` command: exit codes, the ready line and one-line errors."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.support.processes import with_descendants
from envserve.address import is_local_address
from envserve.cli.app import PROGRAM as ENVSERVE
from envserve.client import BatchEnv
from envserve.errors import ServerError
from envserve.monitoring.health_probe import diagnose
from envserve.server.zmq_guards.listeners import listen
from envserve.settings import HostSettings
from tests.command_line import invoke
from tests.envserve.conftest import Join, Serve, WaitUntil
from tests.envserve.limits import resource_limit
from tests.envserve.server_process import ServerProcess
from tests.envserve.session_fakes import make_welcome

PROGRAM = (sys.executable, "-m", "envserve")


def run(
    *arguments: str, program: Sequence[str] = PROGRAM, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=cwd)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    names = ("--env", "CartPole-v1", "--env", "envserve/Ledger-v0")
    with ServerProcess(tmp_path_factory.mktemp("server"), *names) as server:
        yield server


def test_a_server_prints_one_ready_line_and_writes_the_address_file(
    server: ServerProcess,
) -> None:
    assert server.ready_line == (
        f"envserve: ready on {server.address} with 2 env names, "
        f"up to 128 envs in 2 workers\n"
    )
    assert not server.address.endswith(":0")


def test_the_log_has_two_lines_per_lease(serve: Serve) -> None:
    server = serve("--log-format", "json", "--env", "CartPole-v1")
    with BatchEnv.connect("CartPole-v1", [server.address], 2, seed=1) as batch:
        batch.reset()
        for _ in range(3):
            batch.step(np.zeros(2, np.int64))
    log = [json.loads(line) for line in server.end(signal.SIGTERM).splitlines()]
    assert [x for x in log if x["level"] != "info"] == []
    granted, ended = [line for line in log if line.get("lease") == 1]
    assert {line["level"] for line in log} == {"info"}
    assert "lease 1 of local: 2 CartPole-v1, granted to local (" in granted["message"]
    text = r"ended after 6 env steps in \d+\.\d s, \d+/s, faults: 0 \(detached\)"
    assert re.search(text, ended["message"])
    assert (ended["env_steps"], ended["num_faults"], ended["why"]) == (6, 0, "detached")


def test_health_of_a_server_imports_no_slow_modules(server: ServerProcess) -> None:
    timed = (sys.executable, "-X", "importtime", *PROGRAM[1:])
    result = run("health", server.address, "--timeout", "60", program=timed)
    assert result.returncode == 0, result.stderr
    assert "128 of 128 envs free" in result.stdout
    assert result.stdout.count("\n") == 1
    loaded = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "zmq" in loaded
    slow = {"asyncio", "gymnasium", "numpy", "pydantic", "rich", "typer"}
    assert loaded & {*slow, "envserve.cli.app", "envserve.settings"} == set()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
def test_health_does_not_depend_on_its_output(server: ServerProcess) -> None:
    words = [*PROGRAM, "health", server.address, "--timeout", "60"]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_each_health_probe_has_its_exit_code(
    serve: Serve, join: Join, wait_until: WaitUntil
) -> None:
    server = serve("--envs-per-worker", "2", "--drain-grace", "60")
    probes = ("--startup", "--live", "--ready")

    def health(code: int, *probes: str) -> subprocess.CompletedProcess[str]:
        """Retry until the exit code is right; --live fails for 10 s after a lag."""
        results: list[subprocess.CompletedProcess[str]] = []

        def is_code() -> bool:
            results.append(run("health", server.address, "--timeout", "20", *probes))
            return results[-1].returncode == code

        wait_until(is_code, 120.0)
        return results[-1]

    join(server, 1)  # makes the server start a worker
    health(0, *probes)
    rest = join(server, 3, session=6)
    result = health(6, *probes)
    assert result.stdout == ""
    text = f"Error: {server.address}: all 4 envs are leased\n"
    assert result.stderr == text
    rest.close()
    server.signal(signal.SIGTERM)
    wait_until(lambda: server.welcome().is_draining)
    health(5, "--ready")
    health(0, *probes[:2])


def test_a_server_whose_imports_are_running_is_starting(
    tmp_path: Path, serve: Serve, join: Join, wait_until: WaitUntil
) -> None:
    # Only the second template process waits until the test opens the pipe.
    (tmp_path / "slow_envs.py").write_text(
        "import os\nif os.path.exists('pipe'):\n    open('pipe').close()\n"
    )
    server = serve("--import", "slow_envs", cwd=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    os.kill(with_descendants(server.process.pid)[1], signal.SIGKILL)
    client = threading.Thread(target=join, args=(server, 1))
    client.start()
    try:
        wait_until(lambda: server.welcome().is_starting)
        result = run("health", server.address, "--startup", "--timeout", "20")
        assert result.returncode == 3
        assert "workers cannot be started yet" in result.stderr
        welcome = server.welcome()
        assert diagnose(welcome, live=True) is None
        assert diagnose(welcome, ready=True) is not None
    finally:
        pipe = os.open(tmp_path / "pipe", os.O_RDWR)  # lets the module continue
    wait_until(lambda: not server.welcome().is_starting)
    client.join()
    os.close(pipe)


@pytest.mark.parametrize("options", [(), ("--no-preload",)])
def test_a_signal_ends_a_server_whose_import_does_not_return(
    options: Sequence[str], tmp_path: Path, wait_until: WaitUntil
) -> None:
    started = tmp_path / "started"
    env_file = tmp_path / "endless.py"
    env_file.write_text(
        f"import time\nopen({str(started)!r}, 'w').close()\ntime.sleep(600)\n"
    )
    bind = f"ipc://{tmp_path}/server"
    command = [*PROGRAM, "start", str(env_file), "--bind", bind, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
        try:
            wait_until(started.exists, 60.0)
            server.terminate()
            assert server.wait(30.0) == 0
        finally:
            server.kill()


@pytest.mark.parametrize(("lag_ms", "expected"), [(5000, None), (5001, 4)])
def test_a_server_whose_loop_lags_is_not_live(
    lag_ms: int, expected: int | None
) -> None:
    welcome = make_welcome(loop_lag_ms=lag_ms)
    assert diagnose(welcome, startup=True, ready=True) is None
    found = diagnose(welcome, startup=True, live=True, ready=True)
    assert (found and found[0].value) == expected


def test_health_without_a_server_fails_with_one_line() -> None:
    result = run("health", "ipc:///nowhere/envs", "--timeout", "0.2")
    assert result.returncode == 1
    assert result.stderr == (
        "Error: ipc:///nowhere/envs: no server replied within 0.2 s\n"
    )
    result = run("health", "ipc:///nowhere/envs", "--timeout", "")
    assert result.returncode == 2
    assert "--timeout: expected a number; got ''" in result.stderr


def test_envs_lists_the_names_of_a_server_or_of_this_host(
    server: ServerProcess,
) -> None:
    result = run("envs", server.address, "--timeout", "20")
    assert result.stdout.split() == ["CartPole-v1", "envserve/Ledger-v0"]
    result = run("envs", "--import", "tests.oracle.probe_envs")
    assert {"CartPole-v1", "envserve/Ledger-v0"} <= set(result.stdout.split())


def test_envs_reports_names_that_the_server_has_omitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    welcome = make_welcome(env_names=("A-v0", "B-v0"), num_names=1202)
    name = "envserve.client.link.sessionless_requests.request_welcome"
    monkeypatch.setattr(name, lambda *_, **__: welcome)
    result = invoke(ENVSERVE, ["envs", "127.0.0.1"])
    assert (result.exit_code, result.stdout) == (0, "A-v0\nB-v0\n")
    assert result.stderr == (
        "the server offers 1,200 more names, but its replies list at most 2\n"
    )


def test_modules_of_the_working_directory_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('My-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    script = Path(sys.executable).parent / "envserve"
    result = run("envs", "--import", "my_envs", program=[str(script)], cwd=tmp_path)
    assert result.stderr == ""
    assert "My-v0" in result.stdout.split()


def test_modules_in_a_folder_that_others_can_write_to_are_not_imported(
    serve: Serve, join: Join, tmp_path: Path
) -> None:
    # The file has the name of an optional dependency.
    (tmp_path / "jax.py").write_text("open('was_here', 'w')")
    tmp_path.chmod(0o777)
    program = ("-P", *PROGRAM[1:])
    server = serve(cwd=tmp_path, program=program, imports=())
    client = join(server, env_name="phys2d/CartPole-v0")
    assert "jax" in str(client.session.error)
    for options in (["start"], ["replay", "file"]):
        result = run(
            *options, "--import", "jax", program=(PROGRAM[0], *program), cwd=tmp_path
        )
        assert (result.returncode, result.stdout) == (2, "")
        assert "other users can write to the working directory" in result.stderr
    assert {file.name for file in tmp_path.glob("*")} == {"jax.py", "own-0"}


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--bind", "udp://127.0.0.1:1"], 2, "--bind: expected an address like"),
        (["--bind", "127.0.0.1:x"], 2, "--bind: expected an address like tcp://127"),
        (["--bind", "5555"], 2, "--bind: expected an address like tcp://127"),
        (["--workers", "0"], 2, "--workers: expected an int >= 1; got '0'"),
        (["--worker-memory-mib", "9" * 14], 2, "expected an int <= 4294967296; got"),
        # The port would listen on all addresses.
        (["--metrics-host", ""], 2, "--metrics-host: expected a str of length >= 1"),
        (["--lease-seconds", "nan"], 2, "--lease-seconds: expected a number > 0"),
        (["--drain-grace", "-1"], 2, "--drain-grace: expected"),
        (["--drain-grace", "inf"], 2, "--drain-grace: expected"),
        (["--log-level", "loud"], 2, "--log-level"),
        (["--no-such-option"], 2, "--no-such-option"),
        (["--crash-dir", __file__], 2, "--crash-dir: expected a writable folder"),
        (["--env", "CartPole-v9"], 2, "did you mean CartPole-v"),
        (["CartPole-v1", "--vector", "Cartpole-v1"], 2, "did you mean CartPole-v1?"),
        (["--vector", "Nope-v0"], 2, "--vector: expected an offered env; got 'Nope-"),
        (["--import", "no_such_module"], 2, "no_such_module"),
    ],
)
def test_invalid_options_are_errors_without_a_traceback(
    options: list[str], code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds a folder
    result = invoke(ENVSERVE, ["start", *options])
    assert result.exit_code == code
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--address-file", ""], "--address-file . cannot be written"),
        (["--audit", "/nowhere/file"], "--audit: cannot write /nowhere/file"),
    ],
)
def test_files_that_cannot_be_written_are_errors_without_a_traceback(
    options: list[str], text: str
) -> None:
    result = run("start", *options)
    assert result.returncode == 1
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("create", [os.mkfifo, partial(os.symlink, "/dev/null")])
def test_a_pipe_or_link_is_not_replaced_by_the_address_file(
    create: Callable[[Path], None], tmp_path: Path
) -> None:
    create(path := tmp_path / "addresses")
    result = run("start", "--address-file", str(path), "--bind", "tcp://127.0.0.1:0")
    assert result.returncode == 1
    assert f"{path} cannot be written: it is not a regular file" in result.stderr
    assert path.is_fifo() or path.is_symlink()
    assert [*tmp_path.iterdir()] == [path]


def test_an_address_in_use_is_an_error(server: ServerProcess) -> None:
    result = run("start", "--bind", server.address)
    assert result.returncode == 1
    text = (
        f"cannot listen on {server.address}: Address already in use; stop the program"
    )
    assert text in result.stderr


def test_insecure_no_auth_logs_a_warning(serve: Serve) -> None:
    server = serve("--insecure-no-auth", bind=("tcp://0.0.0.0:0",))
    assert "WARNING no keys are used" in server.end(signal.SIGTERM)


#: Program of a server whose self-test finds that unknown keys are accepted.
_OPEN_TO_ALL = """
import sys
import envserve.server
from envserve.cli.app import main
from envserve.errors import SelfTestError
async def fail(*_):
    raise SelfTestError("expected an unknown key to be refused")
sys.modules["envserve.server.serve"].run_self_test = fail
main()
"""


def test_a_server_that_fails_its_self_test_exits_with_3() -> None:
    words = ("start", "--bind", "tcp://127.0.0.1:0", "--workers", "1")
    run = subprocess.run(
        [sys.executable, "-c", _OPEN_TO_ALL, *words], capture_output=True, text=True
    )
    assert run.returncode == 3
    assert "Error: expected an unknown key to be refused" in run.stderr
    assert "ready" not in run.stdout


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://127.8.9.1:0", True),
        ("tcp://localhost:0", True),
        ("tcp://[::1]:5555", True),
        ("ipc:///tmp/envs", True),
        ("tcp://*:5555", False),
        ("tcp://eth0:5555", False),
        ("tcp://10.0.0.1:5555", False),
        ("tcp://[::]:5555", False),
        ("tcp://localhost.example.org:1", False),
    ],
)
def test_only_loopback_and_ipc_addresses_are_local(
    address: str, expected: bool
) -> None:
    assert is_local_address(address) is expected


@pytest.mark.parametrize(
    "address",
    [
        *("", "tcp://", "dns://host", "tcp://host:x", "ipc://", "inproc://a"),
        *("ipc:///a\0b", "ipc:///a\udcff", "tcp://a\udcff:1"),
        *("tcp://[]:5555", "tcp://[%eth0]:5555"),  # not "", which means all interfaces
    ],
)
def test_invalid_bind_addresses_raise(address: str) -> None:
    with pytest.raises(ValueError, match="expected an address like"):
        HostSettings(binds=(address,))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:5555"),
        ("127.0.0.1:0", "tcp://127.0.0.1:0"),
        ("*:5555", "tcp://*:5555"),
        ("[::1]:1", "tcp://[::1]:1"),
        ("tcp://localhost", "tcp://localhost:5555"),
        ("ipc:///tmp/envs", "ipc:///tmp/envs"),
    ],
)
def test_bind_accepts_the_short_forms_of_connect(address: str, expected: str) -> None:
    assert HostSettings(binds=(address,)).binds == (expected,)


def test_a_server_can_listen_at_an_ipv6_address_with_a_zone() -> None:
    for zone in socket.if_nameindex()[0]:  # number and name of an interface
        listener, address = listen(f"tcp://[::1%{zone}]:0")
        with listener:
            number, port = listener.getsockname()[:2]
            assert (number, address) == ("::1", f"tcp://[::1%{zone}]:{port}")
    for zone in ("nowhere", "9" * 40):
        with pytest.raises(ServerError, match=f"{zone}.*: no interface with this name"):
            listen(f"tcp://[::1%{zone}]:0")


def test_a_socket_that_cannot_be_created_or_bound_is_an_error() -> None:
    with pytest.raises(ServerError, match=r"cannot listen on tcp://ü.*: encoding of"):
        listen("tcp://ü..b:1")
    with (
        # A host without IPv6 causes another OSError at the same point.
        resource_limit(os.getpid(), resource.RLIMIT_NOFILE, 0),
        pytest.raises(ServerError, match="Too many open files; choose an address"),
    ):
        listen("tcp://[::1]:0")
