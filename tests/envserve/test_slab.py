"""Rows in shared memory, which is freed when the last process exits."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import envserve
from envserve.slab import Rows, Slab, Status, rows_nbytes
from envserve.spaces.env_spec import EnvSpec
from tests.envserve.interrupts import run_traced
from tests.oracle.probe_envs import SPACES

SPEC = EnvSpec("A-v0", SPACES["dict"], spaces.Box(-1.0, 1.0, (2,), np.float32))
ODD_SPEC = EnvSpec("A-v0", spaces.Box(0, 9, (5,), np.uint8), spaces.Discrete(3))


@pytest.fixture
def slab() -> Any:
    made = Slab.create(SPEC, num_envs=6, num_workers=2)
    yield made
    made.close()


def arrays_of(rows: Rows) -> list[np.ndarray[Any, Any]]:
    flags = [rows.reward, rows.terminated, rows.truncated, rows.status]
    return [*rows.observation, *rows.action, *flags, *rows.final_observation]


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_rows_have_the_shapes_and_dtypes_of_the_spaces(slab: Slab) -> None:
    rows = slab.rows
    for arrays, leaves in (
        (rows.observation, SPEC.observation_leaves),
        (rows.action, SPEC.action_leaves),
        (rows.final_observation, SPEC.observation_leaves),
    ):
        assert [(array.shape, array.dtype) for array in arrays] == [
            ((6, *leaf.shape), leaf.dtype) for leaf in leaves
        ]
    scalars = [rows.reward, rows.terminated, rows.truncated, rows.status]
    assert [array.shape for array in scalars] == [(6,)] * 4
    assert [str(a.dtype) for a in scalars] == ["float64", "bool", "bool", "uint8"]


def test_rows_start_at_zero_which_means_ok(slab: Slab) -> None:
    assert not any(array.any() for array in arrays_of(slab.rows))
    assert int(Status.OK) == 0


@pytest.mark.parametrize("spec", [SPEC, ODD_SPEC], ids=["even", "odd"])
def test_arrays_start_on_cache_lines_and_do_not_overlap(spec: EnvSpec) -> None:
    slab = Slab.create(spec, num_envs=3, num_workers=2)
    arrays = [*arrays_of(slab.rows), slab.heartbeats]
    ends = sorted((address(array), address(array) + array.nbytes) for array in arrays)
    slab.close()
    assert all(start % 64 == 0 for start, _ in ends)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_each_worker_has_its_heartbeat_in_its_own_cache_line(slab: Slab) -> None:
    first, second = slab.heartbeats
    assert address(second) - address(first) == 8 * 64


def test_private_rows_have_the_layout_of_the_slab(slab: Slab) -> None:
    private = Rows.allocate(SPEC, 6)
    for ours, shared in zip(arrays_of(private), arrays_of(slab.rows), strict=True):
        offset = address(ours) - address(private.observation[0])
        assert offset == address(shared) - address(slab.rows.observation[0])
        assert ours.flags.writeable


def test_rows_need_exactly_the_calculated_bytes() -> None:
    nbytes = rows_nbytes(ODD_SPEC, 3)
    Rows.map(ODD_SPEC, 3, bytearray(nbytes))
    with pytest.raises(TypeError):
        Rows.map(ODD_SPEC, 3, bytearray(nbytes - 64))


def test_size_of_enormous_rows_does_not_wrap_around() -> None:
    space = spaces.MultiBinary((2**40, 2**40))
    assert rows_nbytes(EnvSpec("A-v0", space, spaces.Discrete(2)), 1) > 2**80


CHILD = """
import socket, sys
from gymnasium import spaces
from envserve.slab import Slab
from envserve.spaces.env_spec import EnvSpec
channel = socket.socket(fileno=int(sys.argv[1]))
_, (fd,), _, _ = socket.recv_fds(channel, 1, 1)
spec = EnvSpec("A-v0", spaces.Box(0, 9, (5,), "uint8"), spaces.Discrete(3))
slab = Slab(fd, spec, 4, 2)
assert slab.rows.action[0].tolist() == [0, 1, 2, 1]
slab.rows.observation[0][2] = [1, 2, 3, 4, 5]
slab.rows.reward[3] = -0.5
slab.heartbeats[1, 0] += 7
channel.send(b"!")
channel.recv(1)
"""


def test_rows_of_two_processes_are_the_same_memory() -> None:
    slab = Slab.create(ODD_SPEC, num_envs=4, num_workers=2)
    slab.rows.action[0][:] = [0, 1, 2, 1]
    ours, theirs = socket.socketpair()
    ours.settimeout(90)
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(Path(envserve.__file__).parents[1])},
        )
        theirs.close()
        socket.send_fds(ours, [b"s"], [slab.fd])
        assert ours.recv(1) == b"!"
        assert slab.rows.observation[0].tolist() == [
            *([[0] * 5] * 2),
            [1, 2, 3, 4, 5],
            [0] * 5,
        ]
        child.kill()  # its writes persist
        child.wait(timeout=60)
    assert slab.rows.reward.tolist() == [0.0, 0.0, 0.0, -0.5]
    assert slab.heartbeats[:, 0].tolist() == [0, 7]
    slab.close()


def shared_files() -> set[str]:
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return {str(path) for folder in folders for path in folder.glob("*envserve-slab*")}


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_slab_has_no_name_in_any_file_system(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    slab = Slab.create(SPEC, num_envs=2, num_workers=1)
    slab.rows.reward[:] = 1.0
    assert shared_files() == set()
    found = os.fstat(slab.fd)
    assert repr(slab).startswith(f"<Slab {found.st_size} bytes")
    assert found.st_nlink == 0
    slab.close()


@pytest.mark.skipif(sys.platform != "linux", reason="seals are Linux's")
def test_the_descriptor_cannot_be_used_to_resize_the_memory(slab: Slab) -> None:
    size = os.fstat(slab.fd).st_size
    for other in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, other)
    with pytest.raises(PermissionError):
        fcntl.fcntl(slab.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    slab.rows.reward[:] = 1.0
    assert slab.rows.reward.tolist() == [1.0] * 6


def test_interrupted_slab_leaves_no_descriptor() -> None:
    made: list[Slab] = []

    def create() -> None:
        made.append(Slab.create(ODD_SPEC, 2, 1))

    before = {*os.listdir("/dev/fd")}
    for line in range(1, 1 + len(run_traced(create, -1))):
        made.clear()
        run_traced(create, line)
        assert not made
        assert {*os.listdir("/dev/fd")} <= before


def test_closed_slab_keeps_its_rows_but_not_its_descriptor(slab: Slab) -> None:
    slab.rows.reward[:] = 2.0
    fd = slab.fd
    slab.close()
    slab.close()
    assert slab.rows.reward.tolist() == [2.0] * 6
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert "closed" in repr(slab)


def test_slab_that_cannot_be_made_leaves_no_descriptor() -> None:
    space = spaces.MultiBinary((2**40, 2**40))
    before = {*os.listdir("/dev/fd")}
    with pytest.raises((OSError, OverflowError)):
        Slab.create(EnvSpec("A-v0", space, spaces.Discrete(2)), 1, 1)
    assert {*os.listdir("/dev/fd")} <= before
