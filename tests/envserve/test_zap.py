"""A TCP socket with keys accepts only connections that the ZAP handler admits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq

from envserve.errors import SelfTestError
from envserve.keys import formats
from envserve.keys.grant import Grant
from envserve.keys.key_pair import KeyPair
from envserve.server.access import run_self_test
from envserve.server.router import Router
from envserve.server.zmq_guards import connection_watch
from envserve.server.zmq_guards.connection_watch import ConnectionWatch
from envserve.server.zmq_guards.send_budget import SendBudget
from envserve.server.zmq_guards.server_sockets import ServerSockets
from envserve.server.zmq_guards.zap import Zap, user_of
from envserve.session.server.decisions import Audit
from envserve.settings import HostSettings
from envserve.wire.sockets import use_keys
from tests.envserve.zmtp_peers import KEYLESS_COMMANDS, ZmtpPeer

SERVER, AUTHORISED, UNKNOWN = KeyPair.generate(), KeyPair.generate(), KeyPair.generate()
GRANT = Grant(name="ann", public=AUTHORISED.public)
INVITED = Grant(name="bob", public=AUTHORISED.public, until=9e9)
BINDS = ["tcp://127.0.0.1:0"]
#: Seconds within which an admitted client's message arrives, even on a busy machine.
PATIENCE = 20.0
#: Seconds within which an admitted client's message arrives on an idle machine.
SHORT = 0.3

Find = Callable[[bytes], Grant | None]


def find(public: bytes) -> Grant | None:
    return GRANT if public == AUTHORISED.public else None


class KeyedRouter:
    """A ROUTER with keys and its ZAP handler, which collects all messages."""

    def __init__(self, find: Find, **zap_options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.sockets = ServerSockets(BINDS, 1 << 20, self.loop, SERVER.secret)
        self.router = Router(self.sockets, SendBudget(0, 0))
        self.received: list[tuple[Any, bytes]] = []
        self.has_message = asyncio.Event()
        self.zap: Zap | None = None
        if find is not None:
            sockets = self.sockets
            shared = sockets.context, find, self.loop, sockets.is_shut_out
            self.zap = Zap(*shared, **zap_options)
        self.sockets.listen()
        self.sockets.start_reading(self._read)

    def _read(self) -> None:
        while (received := self.router.receive()) is not None:
            self.received.append((received[0], bytes(received[1][0])))
            self.has_message.set()

    @property
    def address(self) -> str:
        return self.sockets.addresses[0]

    async def receives(self, seconds: float) -> bool:
        """Return whether a message arrives within this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.has_message.wait()
        return bool(self.received)

    def close(self) -> None:
        if self.zap is not None:
            self.zap.close()
        self.sockets.close()


@pytest.fixture
async def open_router() -> AsyncIterator[Callable[..., KeyedRouter]]:
    """Return a function that creates routers, which are closed after the test."""
    with contextlib.ExitStack() as stack:

        def open_(find: Any = find, **zap_options: Any) -> KeyedRouter:
            router = KeyedRouter(find, **zap_options)
            stack.callback(router.close)
            return router

        yield open_


@pytest.fixture
def connect() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Connect a client, which sends "let me in"."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = contextlib.ExitStack()

    def connect_(
        address: str,
        pair: KeyPair | None,
        server: bytes = SERVER.public,
        **options: Any,
    ) -> zmq.Socket[bytes]:
        socket = sockets.enter_context(context.socket(zmq.DEALER))
        if pair is not None:
            use_keys(socket, server, pair)
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(address)
        socket.send(b"let me in")
        return socket

    with sockets:
        yield connect_
    context.destroy(linger=0)


#: Keyword arguments to `connect` for clients that must be rejected.
UNKNOWN_CLIENTS: dict[str, dict[str, Any]] = {
    "no keys": {"pair": None},
    "another key of the server": {"pair": AUTHORISED, "server": UNKNOWN.public},
    "an unknown key": {"pair": UNKNOWN},
    "a password": {"pair": None, "PLAIN_USERNAME": b"ann", "PLAIN_PASSWORD": b"ann"},
    "another domain": {"pair": None, "ZAP_DOMAIN": b"envserve"},
}


@pytest.mark.parametrize("client", UNKNOWN_CLIENTS)
async def test_only_a_client_with_a_known_key_is_admitted(
    open_router: Callable[..., KeyedRouter], connect: Callable[..., Any], client: str
) -> None:
    router = open_router()
    connect(router.address, **UNKNOWN_CLIENTS[client])
    assert not await router.receives(SHORT)
    connect(router.address, AUTHORISED)
    assert await router.receives(PATIENCE)
    assert [(peer[-1], text) for peer, text in router.received] == [
        ("ann", b"let me in")
    ]


@pytest.mark.parametrize("mechanism", KEYLESS_COMMANDS)
async def test_no_client_is_admitted_by_a_mechanism_without_keys(
    open_router: Callable[..., KeyedRouter], mechanism: str
) -> None:
    router = open_router()
    with ZmtpPeer(router.address, None) as peer:
        peer.greet_with(mechanism)
        assert not await asyncio.to_thread(peer.is_admitted)
    assert not router.sockets.has_unread()


def fail(public: bytes) -> None:
    raise OSError("the file is gone")


@pytest.mark.parametrize(
    ("handler", "is_stopped"),
    [(None, False), (find, True), (fail, False), (lambda public: None, False)],
    ids=["none", "stopped", "raises", "no known keys"],
)
@pytest.mark.parametrize(
    "pair", [UNKNOWN, AUTHORISED, None], ids=["unknown", "known", "no"]
)
async def test_no_client_is_admitted_unless_the_handler_returns_its_grant(
    open_router: Callable[..., KeyedRouter],
    connect: Callable[..., Any],
    handler: Find | None,
    is_stopped: bool,
    pair: KeyPair | None,
) -> None:
    router = open_router(handler)
    if is_stopped and router.zap is not None:
        router.zap.close()
        router.zap = None
    connect(router.address, pair)
    assert not await router.receives(SHORT)


async def test_a_client_is_admitted_after_a_temporary_failure_of_the_handler(
    open_router: Callable[..., KeyedRouter], connect: Callable[..., Any]
) -> None:
    failures = 1

    def fail_first(public: bytes) -> Grant | None:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError("the file is gone")
        return find(public)

    router = open_router(fail_first)
    connect(router.address, AUTHORISED)
    assert await router.receives(PATIENCE)
    assert router.zap is not None
    assert router.zap.counts == {"300": 1, "200": 1}


async def test_an_invited_client_has_the_invitation_as_its_user(
    open_router: Callable[..., KeyedRouter], connect: Callable[..., Any]
) -> None:
    router = open_router(lambda public: INVITED)
    connect(router.address, AUTHORISED)
    assert await router.receives(PATIENCE)
    (((*_, user), _),) = router.received
    assert user == user_of(INVITED) != "bob"
    assert formats.decode(formats.INVITATION, user) == AUTHORISED.public


async def test_a_rejected_key_is_audited_with_its_fingerprint_and_address(
    open_router: Callable[..., KeyedRouter], connect: Callable[..., Any]
) -> None:
    events: list[Audit] = []
    router = open_router(audit=events.append)
    connect(router.address, UNKNOWN)
    assert not await router.receives(SHORT)
    async with asyncio.timeout(PATIENCE):
        while not events:
            await router.receives(SHORT)
    (event,) = events
    assert (event.event, event.user, event.reason) == ("refused", "", "unknown key")
    shown = formats.fingerprint(UNKNOWN.public)
    assert (event.fingerprint, event.address) == (shown, "127.0.0.1")


async def test_requests_of_unknown_clients_share_the_loop_with_other_callbacks(
    open_router: Callable[..., KeyedRouter],
) -> None:
    """A turn ends after 2 ms, however many requests wait and however slow they are."""

    def find_slowly(public: bytes) -> Grant | None:
        ends_at = time.perf_counter() + 0.002
        while time.perf_counter() < ends_at:
            pass
        return None

    router = open_router(find_slowly)
    assert router.zap is not None
    request = [b"1.0", b"7", b"envserve", b"::1", b"", b"CURVE", UNKNOWN.public]
    with router.sockets.context.socket(zmq.DEALER) as socket:
        socket.connect("inproc://zeromq.zap.01")
        for _ in range(20):
            socket.send_multipart([b"", *request])
        counts = [0]
        async with asyncio.timeout(PATIENCE):
            while counts[-1] < 20:
                await asyncio.sleep(0)
                counts.append(router.zap.counts["400"])
        assert max(b - a for a, b in itertools.pairwise(counts)) == 1


async def test_requests_wait_until_the_grants_are_up_to_date(
    open_router: Callable[..., KeyedRouter], connect: Callable[..., Any]
) -> None:
    is_ready = False
    router = open_router(is_ready=lambda: is_ready)
    connect(router.address, AUTHORISED)
    assert not await router.receives(SHORT)
    assert router.zap is not None
    assert not router.zap.counts
    is_ready = True
    assert await router.receives(PATIENCE)
    assert router.zap.counts == {"200": 1}


async def test_malformed_requests_are_answered(
    open_router: Callable[..., KeyedRouter],
) -> None:
    router = open_router()
    assert router.zap is not None
    valid = [b"1.0", b"7", b"envserve", b"127.0.0.1", b"", b"CURVE", AUTHORISED.public]
    socket = router.sockets.context.socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect("inproc://zeromq.zap.01")
    for index, (request, status) in enumerate(
        [
            (valid, b"200"),
            ([*valid[:6], UNKNOWN.public], b"400"),
            ([*valid[:6], b"short"], b"300"),
            ([*valid[:5], b"NULL"], b"300"),
            ([*valid[:5], b"PLAIN", b"ann", b"ann"], b"300"),
            ([*valid[:2], b"", *valid[3:]], b"300"),
            ([b"2.0", *valid[1:]], b"300"),
            ([b"1.0", b"7"], b"300"),
            ([b""], b"300"),
        ]
    ):
        socket.send_multipart(request)
        assert await asyncio.to_thread(socket.poll, int(1000 * PATIENCE))
        version, number, found, _, user, metadata = socket.recv_multipart()
        assert (found, user) == (status, b"" if index else b"ann"), request
        assert (version, metadata) == (b"1.0", b"")
        assert number == (b"7" if len(request) > 1 else b"")
    assert router.zap.counts == {"200": 1, "400": 1, "300": 7}
    socket.close()


async def test_a_server_that_would_admit_unknown_keys_does_not_start(
    open_router: Callable[..., KeyedRouter],
) -> None:
    router = open_router()
    assert router.zap is not None
    await run_self_test(router.sockets, router.zap, SERVER.public)
    assert not router.zap.counts
    careless = open_router(lambda public: GRANT)
    assert careless.zap is not None
    with pytest.raises(SelfTestError, match="expected an unknown key to be"):
        await run_self_test(careless.sockets, careless.zap, SERVER.public)


async def test_a_server_without_keys_logs_repeated_warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = sys.modules["envserve.server.serve"]
    monkeypatch.setattr(module, "_NO_KEYS_WARNING_SECONDS", 0.0)
    open_to_all = HostSettings(binds=("tcp://127.0.0.1:1",), insecure_no_auth=True)
    warning = asyncio.create_task(module._warn_of_no_keys(open_to_all))
    for _ in range(3):
        await asyncio.sleep(0)
    warning.cancel()
    assert caplog.text.count("no keys are used") == 3


async def test_a_user_who_makes_the_server_close_all_connections_is_blocked_for_a_while(
    open_router: Callable[..., KeyedRouter],
    connect: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = open_router()
    for count in range(1, 4):
        socket = connect(router.address, AUTHORISED)
        assert await router.receives(PATIENCE)
        socket.send_multipart([b""] * 60_000)
        async with asyncio.timeout(PATIENCE):
            while caplog.text.count("closed all connections") < count:
                await asyncio.sleep(0.01)  # as the server does between turns
                router._read()
        router.has_message.clear()
        socket.close()
    assert "ann is rejected for 60 s" in caplog.text
    assert router.sockets.is_shut_out("ann")
    router.received.clear()
    connect(router.address, AUTHORISED)
    assert router.zap is not None
    async with asyncio.timeout(PATIENCE):
        while not router.zap.counts["300"]:
            assert not await router.receives(SHORT)
    router.sockets._blamed["ann"] = [router.loop.time() - 61.0] * 3
    assert await router.receives(PATIENCE)


async def test_the_user_with_most_of_many_connections_is_suspected(
    open_router: Callable[..., KeyedRouter],
) -> None:
    zap = open_router().zap
    assert zap is not None
    zap.num_admitted.update({"ann": 100, "bob": 9})
    assert zap.take_suspect(50) == "ann"
    assert zap.take_suspect(50) == ""
    zap.num_admitted.update({"ann": 100, "bob": 100})
    assert zap.take_suspect(50) == ""
    zap.num_admitted.update({"ann": 9})
    assert zap.take_suspect(50) == ""
    zap.num_admitted.update({"ann": 60})
    assert zap.take_suspect(100) == ""


@pytest.mark.parametrize("is_shortage", [False, True])
async def test_a_user_is_blamed_for_used_up_descriptors_but_not_for_memory(
    open_router: Callable[..., KeyedRouter],
    is_shortage: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = open_router()
    assert router.zap is not None
    monkeypatch.setattr(connection_watch, "_MIN_SHORTAGE_SECONDS", 0.0)
    monkeypatch.setattr(connection_watch, "_has_free_descriptor", lambda: False)
    limit = 1 << 60 if is_shortage else -1
    watch = ConnectionWatch(router.loop, router.sockets, router.zap, lambda: limit, 50)
    for count in range(1, 4):
        router.zap.num_admitted.update({"ann": 60})
        watch._check()
        assert router.sockets.num_reopened == count
        assert not router.zap.num_admitted
    watch.stop()
    assert router.sockets.is_shut_out("ann") is is_shortage
