"""A server that is flooded with bad messages, and crashes, does not reveal its secrets.

The places that other users may read are command lines, the memory of workers, the log,
crash files and core files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.support.processes import with_descendants
from envserve.keys import formats
from envserve.keys.key_folder import KeyFolder
from envserve.wire.message import Buffer
from tests.envserve.conftest import Serve
from tests.envserve.pool_driver import FAULTY, attach_lane, step
from tests.envserve.server_process import ServerProcess
from tests.envserve.test_fuzz_server import (
    Attacker,
    messages_of_odd_values,
    mutated_messages,
    random_messages,
    valid_messages,
)

NUM_MESSAGES = 2_000
PLANTED = "planted-3f1c0a7be94d"
#: Command that allows its program to write core files as large as the system permits.
WITH_CORE_FILES = ("sh", "-c", 'ulimit -S -c "$(ulimit -H -c)" && exec "$@"', "sh")


def secrets_of(folder: KeyFolder) -> dict[str, bytes]:
    """Return a dict from names to secrets that other users must not be able to read."""
    secrets = {"environment variable": PLANTED.encode()}
    for role in ("server", "client"):
        pair = folder.key(role)
        assert pair is not None
        text = formats.encode(formats.SECRET, pair.secret).encode()
        assert text in (folder.path / f"{role}.key").read_bytes()
        secrets |= {f"{role}.key, as text": text, f"{role}.key, raw": pair.secret}
    return secrets


def memory_of(pid: int) -> Iterator[bytes]:
    """Yield the parts of a process's memory that a core file would contain."""
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) r", line)
            if found and not line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                start, stop = (int(number, 16) for number in found.groups())
                with contextlib.suppress(OSError):  # an unmapped page
                    yield os.pread(memory.fileno(), stop - start, start)


def places_of(server: ServerProcess, crashes: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the places that other users may read."""
    pid, *started = with_descendants(server.process.pid)
    yield "argv of the server", Path(f"/proc/{pid}/cmdline").read_bytes()
    for pid in started:
        yield f"argv of {pid}", Path(f"/proc/{pid}/cmdline").read_bytes()
        for data in memory_of(pid):
            yield f"memory of {pid}", data
    yield "log", server.log.encode()
    for path in crashes.iterdir():
        yield str(path), path.read_bytes()


def send_bad_messages(address: str, random: np.random.Generator) -> bytes:
    """Send messages that the server rejects; return their content."""
    with contextlib.closing(Attacker(address)) as attacker:
        boot = attacker.wait_for_reply(1 << 49)
        kinds: list[Iterator[Sequence[Buffer]]] = [
            random_messages(random),
            messages_of_odd_values(boot, attacker.attach(boot), random),
            mutated_messages(valid_messages(boot), random),
        ]
        sent: list[bytes] = []
        for messages in kinds:
            for frames in itertools.islice(messages, NUM_MESSAGES):
                attacker.send(frames)
                sent += [bytes(frame) for frame in frames]
        attacker.wait_for_reply(1 << 50)
    return b"\0".join(sent)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_flood_neither_contains_nor_reveals_a_secret(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    random_generator: np.random.Generator,
) -> None:
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "home"))
    (crashes := tmp_path / "crashes").mkdir()
    options = ("--log-level", "debug", "--allow-kwarg", "fault:any", "--crash-dir")
    planted = {"ENVSERVE_PLANTED": PLANTED}
    server = serve(*options, str(crashes), environment=planted, prefix=WITH_CORE_FILES)
    places = [("sent messages", send_bad_messages(server.address, random_generator))]
    crashing = attach_lane(server, FAULTY, 1, env_kwargs={"fault": "raise"})
    with contextlib.closing(crashing) as lane:
        (outcome,) = step(lane, 1)
        assert outcome.faults
        assert list(crashes.iterdir()), "expected a crash file"
        places += places_of(server, crashes)
    with contextlib.suppress(PermissionError):
        environment = Path(f"/proc/{server.process.pid}/environ").read_bytes()
        # The secret may appear only in the environment variable that the test has set.
        assert PLANTED.encode() in environment
        clean = environment.replace(PLANTED.encode(), b"")
        places.append(("environment of the server", clean))
    secrets = secrets_of(KeyFolder())
    assert not [
        f"{name} in {place}"
        for place, data in places
        for name, secret in secrets.items()
        if secret in data
    ]
    server.signal(signal.SIGABRT)
    ended = os.waitid(os.P_PID, server.process.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    assert ended.si_code != os.CLD_DUMPED
