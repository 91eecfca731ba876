"""Peers without a session can harm neither a server nor its clients."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from envserve.wire.sockets import raise_file_limit
from tests.envserve.conftest import Attach, Serve, WaitUntil
from tests.envserve.pool_driver import kill, step
from tests.envserve.zmtp_peers import ZmtpPeer, honest_client, predicted_ids

MIB = 1 << 20
#: Maximum memory growth of a server after an attack.
MAX_GROWTH_BYTES = 300 * MIB
#: Maximum memory growth after an attack if the server has keys.
MAX_KEYED_GROWTH_BYTES = 32 * MIB
#: Maximum step time during an attack: 0.25 s on an idle machine, but many times as long
#: on a busy one.
MAX_STEP_SECONDS = 10.0
KEYED = ("--allow-kwarg", "length", "--drain-grace", "0")
#: No keys, because a server with keys rejects peers without a key during the handshake.
OPENINGS = (*KEYED, "--insecure-no-auth")
FEW_DESCRIPTORS = ("sh", "-c", 'ulimit -n 400 && exec "$@"', "sh")

Attack = Callable[[str], Iterator[None]]


def announce_routing_ids(address: str) -> Iterator[None]:
    """Use the routing ids that a server with an unseeded `rand()` would assign next."""
    with contextlib.ExitStack() as stack:
        for routing_id in predicted_ids(20):
            stack.enter_context(ZmtpPeer(address, routing_id))
        for _ in range(20):
            stack.enter_context(ZmtpPeer(address))
        yield


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc's rand()")
def test_peers_that_announce_routing_ids_do_not_abort_the_server(serve: Serve) -> None:
    server = serve(*OPENINGS)
    with honest_client(server):
        for _ in announce_routing_ids(server.address):
            assert server.welcome().num_names > 0
    assert server.process.poll() is None, server.log


def fill_with_taken_routing_ids(address: str) -> Iterator[None]:
    """Send from peers with the same routing id; only the first one's data is read."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            peer = stack.enter_context(ZmtpPeer(address, b"taken"))
            with contextlib.suppress(ConnectionError):
                for _ in range(70):
                    peer.send(*[bytes(MIB)] * 3)
            yield


def fill_with_endless_frames(address: str) -> Iterator[None]:
    """Send a message without a last frame; ZeroMQ buffers incomplete messages."""
    with ZmtpPeer(address) as peer, contextlib.suppress(ConnectionError):
        for _ in range(10):
            peer.send_unfinished(MIB)
            yield


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "fill", [fill_with_taken_routing_ids, fill_with_endless_frames]
)
def test_memory_that_peers_fill_is_freed(
    serve: Serve, wait_until: WaitUntil, fill: Attack
) -> None:
    server = serve(*OPENINGS)
    with honest_client(server) as client:
        before = server.resident_bytes
        for _ in fill(server.address):
            if "memory grew" in server.log:
                break
        wait_until(lambda: server.resident_bytes - before < MAX_GROWTH_BYTES)
        num_steps = len(client.seconds)
        wait_until(lambda: len(client.seconds) > num_steps + 10)
    assert "memory grew" in server.log
    assert max(client.seconds) < MAX_STEP_SECONDS


@pytest.mark.parametrize("place", [0, 1])
def test_a_message_of_endless_frames_does_not_delay_other_clients(
    serve: Serve, wait_until: WaitUntil, tmp_path: Path, place: int
) -> None:
    binds = ("tcp://127.0.0.1:0", f"ipc://{tmp_path}/envs")
    server = serve(*OPENINGS, bind=binds if place == 0 else binds[::-1])
    with honest_client(server) as client:
        for _ in range(3):
            with ZmtpPeer(server.addresses[place]) as peer:
                peer.send_unfinished(MIB // 8)
                peer.send(b"the last one")
                peer.wait_until_disconnected()
            server.welcome()
            num_steps = len(client.seconds)
            wait_until(lambda: len(client.seconds) > num_steps + 10)  # noqa: B023
    assert server.log.count("a message had too many frames") == 3
    assert max(client.seconds) < MAX_STEP_SECONDS


@contextlib.contextmanager
def idle_peers(address: str, count: int) -> Iterator[None]:
    """Open `count` connections that send nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sockets = [context.socket(zmq.DEALER) for _ in range(count)]
        for each in sockets:
            each.setsockopt(zmq.RECONNECT_IVL, -1)
            each.connect(address)
        yield
    finally:
        context.destroy(linger=0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_idle_peers_leave_descriptors_for_others(
    serve: Serve, attach: Attach, wait_until: WaitUntil
) -> None:
    raise_file_limit()
    server = serve(*OPENINGS, prefix=FEW_DESCRIPTORS)
    lane = attach(server, env_kwargs={"length": 10**6})
    folder = Path(f"/proc/{server.process.pid}/fd")
    with idle_peers(server.address, 500):
        wait_until(lambda: len(list(folder.iterdir())) >= 398)
        kill(server.worker_pids[0])
        while not any(outcome.faults for outcome in step(lane, 1)):
            pass
        assert not any(outcome.faults for outcome in step(lane, 1))
        step(attach(server), 1)
        # This may take longer if the new worker reuses its predecessor's descriptors.
        wait_until(lambda: "connections use all descriptors" in server.log)
    assert "could not be started" not in server.log


def take_all_descriptors(address: str) -> Iterator[None]:
    with idle_peers(address, 500):
        yield


def fill_in_handshakes(address: str) -> Iterator[None]:
    """Send data within unfinished handshakes; ZeroMQ buffers it."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(ZmtpPeer(address, None)) for _ in range(40)]
        for number, peer in enumerate(peers):
            with contextlib.suppress(ConnectionError):
                peer.begin_handshake()
                peer.send(bytes(MIB)) if number % 2 else peer.send_unfinished(MIB)
        yield


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("attack", "is_disconnected"),
    [
        (announce_routing_ids, True),
        (fill_with_taken_routing_ids, True),
        (fill_with_endless_frames, True),
        (fill_in_handshakes, False),
        (take_all_descriptors, False),
    ],
)
def test_peers_without_a_key_have_no_effect_on_a_server_with_keys(
    serve: Serve, wait_until: WaitUntil, attack: Attack, is_disconnected: bool
) -> None:
    raise_file_limit()
    server = serve(*KEYED, prefix=FEW_DESCRIPTORS)
    with honest_client(server) as client:
        before = peak = server.resident_bytes
        for _ in range(3):
            num_steps = len(client.seconds)
            with contextlib.ExitStack() as stack:
                if is_disconnected:
                    stack.enter_context(pytest.raises(ConnectionError))
                for _ in attack(server.address):
                    peak = max(peak, server.resident_bytes)
            wait_until(lambda: len(client.seconds) > num_steps + 10)  # noqa: B023
            peak = max(peak, server.resident_bytes)
        assert server.welcome().num_names > 0
    assert peak - before < MAX_KEYED_GROWTH_BYTES
    assert "closed all connections" not in server.log
    assert server.process.poll() is None
    assert max(client.seconds) < MAX_STEP_SECONDS
