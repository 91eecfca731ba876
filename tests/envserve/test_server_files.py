"""The socket file at a server's ipc address: permissions, owner and reuse."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.envserve.conftest import Serve
from tests.envserve.server_process import command

OTHER_USER = 65534
needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can act as another user"
)
#: Program that greets a server, and prints the number of bytes received.
GREET = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
peer = socket.socket(socket.AF_UNIX)
peer.settimeout(20.0)
try:
    peer.connect(sys.argv[1])
    peer.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00NULL")
    print(len(peer.recv(64)))
except ConnectionError:
    print(0)
except PermissionError:
    print("no permission")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's folders."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def greet_as(user: int, path: Path) -> str:
    """Greet the server at a path as another user; return the program's output."""
    return subprocess.run(
        [sys.executable, "-c", GREET, str(path), str(user)],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout.strip()


def bind_error_at(path: Path) -> str:
    """Start a server that cannot listen at a path; return its error message."""
    result = subprocess.run(
        command("--bind", f"ipc://{path}"),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, "")
    *_, line = result.stderr.splitlines()
    assert line.startswith(f"Error: cannot listen on ipc://{path}: "), line
    return line


@needs_root
def test_only_the_user_of_the_server_can_connect(
    serve: Serve, open_folder: Path
) -> None:
    path = open_folder / "private" / "envs"
    with contextlib.ExitStack() as stack:
        stack.callback(os.umask, os.umask(0))
        server = serve(bind=(f"ipc://{path}",))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert greet_as(OTHER_USER, path) == "no permission"
    # The server also rejects this user if the permissions change later.
    path.parent.chmod(0o777)
    path.chmod(0o777)
    assert greet_as(OTHER_USER, path) == "0"
    assert int(greet_as(os.getuid(), path)) > 0
    assert server.welcome().num_names > 0


def test_a_socket_that_a_killed_server_left_is_replaced(
    serve: Serve, tmp_path: Path
) -> None:
    bind = (f"ipc://{tmp_path}/envs",)
    serve(bind=bind).kill()
    assert stat.S_ISSOCK((tmp_path / "envs").lstat().st_mode)
    assert serve(bind=bind).welcome().num_names > 0


def test_an_address_in_use_is_not_taken_over(serve: Serve, tmp_path: Path) -> None:
    server = serve("--drain-grace", "0", bind=(f"ipc://{tmp_path}/envs",))
    assert "another server listens at this path" in bind_error_at(tmp_path / "envs")
    assert server.welcome().num_names > 0
    server.end(signal.SIGTERM)
    assert not (tmp_path / "envs").exists()


def test_the_error_about_a_long_path_advises_a_shorter_one(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 108)
    assert "path too long; choose a short, unused path" in bind_error_at(path)


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    file, link = tmp_path / "thesis", tmp_path / "link"
    file.write_text("all of it")
    link.symlink_to(tmp_path / "nowhere")
    for path in (file, link):
        assert "the path is an existing file" in bind_error_at(path)
    assert file.read_text() == "all of it"
    assert link.is_symlink()


@needs_root
def test_a_socket_of_another_user_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "envs"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    os.chown(path, OTHER_USER, -1)
    assert f"user {OTHER_USER}" in bind_error_at(path)
    assert path.exists()


def test_a_missing_parent_folder_is_an_error(tmp_path: Path) -> None:
    line = bind_error_at(tmp_path / "no" / "such" / "envs")
    assert "No such file or directory" in line
