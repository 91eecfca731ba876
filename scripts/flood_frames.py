"""Send malformed messages, and messages of another lease, while a client checks rows.

    python scripts/flood_frames.py [--messages 1000000]            about 4 minutes

The script first sends malformed messages: mutated messages of the attacker's lease,
messages with chosen routing ids, and messages over connections that break. It then
sends messages with the ids of another client's lease. Finally, it searches for secret
keys in all data that other users may read. Exits with 1 if a goal is missed, or if a
row is wrong or lost. Linux only.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final
from unittest import mock

import numpy as np
import typer
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lab.processes import vitals_of, with_descendants
from benchmarks.lab.siege import Cores, Goals
from envserve.keys import formats
from envserve.keys.grant import Grant
from envserve.keys.key_folder import KeyFolder
from envserve.lane import Call
from envserve.wire.bodies import Attach, CallBody, ResetBody
from envserve.wire.constants import MessageType
from envserve.wire.handshake import ErrorBody, Hello
from envserve.wire.message import Buffer, Message, decode, encode
from tests.envserve.pool_driver import FAULTY, LEDGER, attach_lane, step
from tests.envserve.server_process import ServerProcess, use_user_keys
from tests.envserve.strangers import Stranger, honest_client
from tests.envserve.test_fuzz_server import (
    Attacker,
    messages_of_odd_values,
    mutated_messages,
    random_messages,
    valid_messages,
)

MAX_GROWTH_MIB: Final = 32.0
MAX_MORE_DESCRIPTORS: Final = 8
_OPTIONS: Final = ("--allow-kwarg", "length", "--allow-kwarg", "fault:any")
_WARM_UP: Final = 20_000
#: Number of messages between two steps of the attacker's env, and between two new
#: connections.
_STEP_EVERY, _PEER_EVERY = 32, 1000
#: Seconds after which an answer is considered lost.
_STEP_SECONDS: Final = 2.0
_STRANGERS: Final = 50
#: Maximum number of unread answers. If twice as many are unread, the server drops some.
_MAX_UNREAD: Final = 24
_SETTLE_SECONDS: Final = 10.0
_PLANTED: Final = "planted-3f1c0a7be94d"


class Peer(Attacker):
    """An attacker that counts answers of each type, and occasionally steps an env."""

    def __init__(self, address: str, session: int) -> None:
        super().__init__(address)
        self.session = session
        self.answers: Counter[int] = Counter()
        self.boot = self.wait_for_answer(1 << 49)
        self.valid = valid_messages(self.boot)
        self.epoch = self.attach(self.boot, session)
        self._seq = 0
        self._renew()

    def _renew(self) -> None:
        """Create the lease's next operation, which is also one of those to mutate."""
        self._seq += 1
        kind, body = MessageType.STEP, bytes(8)
        if self._seq == 1:
            kind, body = MessageType.RESET, ResetBody(resets=((None, None),)).encode()
        self._next_operation = Message(
            kind,
            session=self.session,
            boot=self.boot,
            epoch=self.epoch,
            request=self._seq,
            entries=((0, self._seq),),
            body=body,
        )
        self.valid[2] = encode(self._next_operation)

    def step(self) -> None:
        """Step the env, which ensures that the server has handled earlier messages.

        If a mutated message has ended the lease, attach in a new session.
        """
        seq = self._seq
        deadline = time.monotonic() + _STEP_SECONDS
        self.send(encode(self._next_operation))
        while self._seq == seq and time.monotonic() < deadline:
            self._socket.poll(100)
            self.read()
        if self._seq == seq:
            self.session, self._seq = self.session + 1, 0
            self.epoch = self.attach(self.boot, self.session)
            self._renew()

    def read(self) -> None:
        """Read all answers that have arrived."""
        while self._socket.poll(0):
            answer = decode(self._socket.recv_multipart())
            self.answers[answer.type] += 1
            is_next = answer.session == self.session
            is_next = is_next and answer.entries == self._next_operation.entries
            if is_next and answer.type is MessageType.RESULT:
                self._renew()


def send_bad(address: str, count: int, seed: int) -> Counter[int]:
    """Send malformed messages; return the number of answers of each type."""
    random = np.random.default_rng(seed)
    session = int(random.integers(1, 1 << 62))
    with contextlib.closing(Peer(address, session)) as peer:
        odd = messages_of_odd_values(peer.boot, peer.epoch, random, session)
        garbage: Iterator[Sequence[Buffer]] = itertools.chain(
            itertools.islice(random_messages(random), count // 10),
            itertools.islice(odd, count // 10),
            mutated_messages(peer.valid, random),
        )
        strangers: list[Stranger] = []
        for number, frames in enumerate(itertools.islice(garbage, count)):
            peer.send(frames)
            if number % _STEP_EVERY == 0:
                peer.step()
            if number % _PEER_EVERY == 0:
                announce(address, b"\0" + random.bytes(4))
                strangers.append(Stranger(address, None))
                strangers[-1].send_half()
                if len(strangers) > _STRANGERS:
                    strangers.pop(0).socket.close()
        peer.wait_for_answer(1 << 51)
        for stranger in strangers:
            stranger.socket.close()
        return peer.answers


def announce(address: str, routing_id: bytes) -> None:
    """Send HELLO as a client that has chosen its routing id, and disconnect."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        dealer.setsockopt(zmq.LINGER, 0)
        use_user_keys(dealer, address)
        dealer.connect(address)
        hello = Message(MessageType.HELLO, body=Hello().encode())
        dealer.send_multipart(encode(hello))
        dealer.poll(100)


def send_as_another(
    address: str, count: int, numbers: tuple[int, int], attach: bytes
) -> tuple[int, list[Any], list[Any]]:
    """Send messages with the ids of another client's lease, and of an unknown session.

    Args:
      address: Address of the server.
      count: Number of messages.
      numbers: Session and epoch of the other client's lease.
      attach: Body of the ATTACH message of the other client.

    Returns:
      The number of answers, and the distinct answers for each of the two sessions.
    """

    @functools.cache
    def error_text(body: bytes) -> str:
        return ErrorBody.decode(body).text if body else ""

    session, epoch = numbers
    call = CallBody.from_calls([Call(0, (0,), "call", "render")]).encode()
    reset = ResetBody(resets=((None, None),)).encode()
    bodies = [
        (MessageType.PING, b"", ()),
        (MessageType.STEP, bytes(8), ((0, 1),)),
        (MessageType.RESET, reset, ((0, 1),)),
        (MessageType.CALL, call, ((0, 1),)),
        (MessageType.DETACH, b"", ()),
        (MessageType.ATTACH, attach, ()),
    ]
    kinds: dict[int, set[Any]] = {session: set(), session ^ 1 << 40: set()}
    num_answers = 0

    class Reader(Attacker):
        def read(self) -> None:
            nonlocal num_answers
            while self._socket.poll(0):
                frames = self._socket.recv_multipart()
                answer = decode(frames)
                num_answers += 1
                if answer.session in kinds:
                    index = answer.request % len(bodies)
                    reply = int(answer.type), error_text(answer.body)
                    kinds[answer.session].add((bodies[index][0].name, *reply))

        def wait(self) -> None:
            self._socket.poll(100)
            self.read()

    with contextlib.closing(Reader(address)) as peer:
        boot = peer.wait_for_answer(1 << 49)
        order = itertools.cycle(itertools.product(kinds, range(len(bodies))))
        for number, (target, index) in enumerate(itertools.islice(order, count)):
            kind, body, entries = bodies[index]
            message = Message(kind, session=target, boot=boot, epoch=epoch, body=body)
            message.request = number // (2 * len(bodies)) * len(bodies) + index
            message.entries = entries
            peer.send(encode(message))
            until = time.monotonic() + _STEP_SECONDS
            while num_answers < number - _MAX_UNREAD and time.monotonic() < until:
                peer.wait()
    known, unknown = (sorted(found, key=repr) for found in kinds.values())
    return num_answers, known, unknown


def as_attacker(home: Path, cores: Cores, run: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process with the attacker's keys; return its result."""
    spawn = multiprocessing.get_context("spawn")
    with (
        cores.of("attacker"),
        mock.patch.dict(os.environ, ENVSERVE_HOME=str(home)),
        ProcessPoolExecutor(1, spawn) as executor,
    ):
        return executor.submit(run, *args).result()


def planted_secrets(folder: KeyFolder) -> dict[str, bytes]:
    """Return a dict from names to secrets that other users must not be able to read."""
    secrets = {"environment variable": _PLANTED.encode()}
    pairs = {"server": folder.key("server"), "client": folder.key("client")}
    for name, pair in pairs.items():
        assert pair is not None
        text = formats.encode(formats.SECRET, pair.secret)
        secrets[f"{name}.key, as text"] = text.encode()
        secrets[f"{name}.key, raw"] = pair.secret
        assert text.encode() in (folder.path / f"{name}.key").read_bytes()
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


def places_of(server: ServerProcess, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the contents of all data that other users may read.

    The places are command lines, the memory of workers, the log and crash files.
    """
    pid, *started = with_descendants(server.process.pid)
    yield "argv of the server", Path(f"/proc/{pid}/cmdline").read_bytes()
    for pid in started:
        yield f"argv of {pid}", Path(f"/proc/{pid}/cmdline").read_bytes()
        for data in memory_of(pid):
            yield f"memory of {pid}, which a core file would hold", data
    yield "log", server.log.encode()
    for path in filter(Path.is_file, folder.rglob("*")):
        yield str(path), path.read_bytes()


def search_for_secrets(server: ServerProcess, folder: Path, goals: Goals) -> None:
    """Search for secrets in all data that other users may read.

    Then check that the server writes no core file when it crashes.
    """
    secrets = planted_secrets(KeyFolder())
    crashing = attach_lane(server, FAULTY, 1, env_kwargs={"fault": "raise"})
    with contextlib.closing(crashing) as lane:
        (outcome,) = step(lane, 1)
        assert outcome.faults
        crashes = list((folder / "crashes").iterdir())
        assert crashes, "expected a crash file"
        places = list(places_of(server, folder))
    size = sum(len(data) for _, data in places) / 2**20
    print(f"{len(places)} places ({size:.0f} MiB) searched, with {crashes[0].name}")
    found = [
        f"{name} in {place}"
        for place, data in places
        for name, secret in secrets.items()
        if secret in data
    ]
    print(*found, sep="\n")
    goals.at_most("secrets found", len(found), 0)
    server.signal(signal.SIGABRT)
    pid = server.process.pid
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    goals.at_most("core files of the server", ended.si_code == os.CLD_DUMPED, 0)


def vitals(server: ServerProcess) -> tuple[float, int]:
    """Return the memory in MiB and the number of descriptors of a server."""
    found = vitals_of(server.process.pid)
    assert found is not None
    return found.resident_bytes / 2**20, found.num_files


def flood(
    server: ServerProcess, mallory: Path, messages: int, cores: Cores, goals: Goals
) -> None:
    """Send all messages, and record the effects on the server."""
    address = server.address
    with honest_client(server) as client:
        as_attacker(mallory, cores, send_bad, address, _WARM_UP, 0)
        mib, descriptors = vitals(server)
        started, first = time.monotonic(), len(client.seconds)
        answers = as_attacker(mallory, cores, send_bad, address, messages, 1)
        requests = client.lane._session.requests
        numbers = requests.session, requests.epoch
        attach = Attach(env_name=LEDGER, num_envs=4, seed=3).encode()
        args = address, messages, numbers, attach
        count, known, unknown = as_attacker(mallory, cores, send_as_another, *args)
        seconds = time.monotonic() - started
        steps = client.seconds[first:]
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until and (
            vitals(server)[0] > mib + MAX_GROWTH_MIB
            or vitals(server)[1] > descriptors + MAX_MORE_DESCRIPTORS
        ):
            time.sleep(0.1)
        mib_after, descriptors_after = vitals(server)
    total = answers.total()
    print(
        f"{2 * messages:,} messages in {seconds:.0f} s; {total:,} answers to malformed "
        f"ones, {count:,} to those of another key; {len(steps):,} correct steps"
    )
    goals.at_least(
        "RESULTs among answers (%)", 100 * answers[MessageType.RESULT] / total, 3
    )
    goals.at_least("messages of another key answered (%)", 100 * count / messages, 90)
    goals.at_most(
        "answers that differ from an unknown session's",
        len(set(known) ^ set(unknown)),
        0,
    )
    goals.at_most("growth of the server (MiB)", mib_after - mib, MAX_GROWTH_MIB)
    more = descriptors_after - descriptors
    goals.at_most("additional descriptors", more, MAX_MORE_DESCRIPTORS)
    goals.at_most("longest step of the other client (ms)", 1e3 * max(steps), 500)


def main(
    messages: Annotated[
        int, typer.Option(help="Messages of each of the two kinds.")
    ] = 10**6,
) -> None:
    """Flood a server."""
    cores, goals = Cores(), Goals()
    print(cores, flush=True)
    limits = ("sh", "-c", 'ulimit -c unlimited && exec "$@"', "sh")
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["ENVSERVE_HOME"] = str(root / "home")
        folder, attacker = KeyFolder(), KeyFolder(root / "mallory")
        server_pair, pair = folder.ensure_key("server"), attacker.ensure_key("client")
        folder.ensure_key("client")
        grant = Grant(
            name="mallory", public=pair.public, envs=("CartPole-v1",), share=1000.0
        )
        folder.clients.add(grant, time.time())
        server_folder = root / "server"
        (server_folder / "crashes").mkdir(parents=True)
        with cores.of("server"):
            options = (*_OPTIONS, "--crash-dir", str(server_folder / "crashes"))
            server = ServerProcess(
                server_folder,
                *(*options, "--drain-grace", "0", "--log-level", "info"),
                environment={"ENVSERVE_PLANTED": _PLANTED},
                prefix=limits,
            )
        stack.enter_context(server)
        stack.enter_context(cores.of("client"))
        attacker.add_pin([server.address], server_pair.public, "mallory")
        flood(server, root / "mallory", messages, cores, goals)
        search_for_secrets(server, server_folder, goals)
    sys.exit(goals.report())


if __name__ == "__main__":
    typer.run(main)
