"""Who gets in at a tcp socket with keys: nobody but whom the handler knows."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zmq

from envserve.errors import SelfTestError
from envserve.keys import formats
from envserve.keys.grant import Grant
from envserve.keys.key_pair import KeyPair
from envserve.server.access import check_unknown_key_refused
from envserve.server.router import Router
from envserve.server.zmq_guards import connection_watch
from envserve.server.zmq_guards.connection_watch import ConnectionWatch
from envserve.server.zmq_guards.send_budget import SendBudget
from envserve.server.zmq_guards.server_sockets import ServerSockets
from envserve.server.zmq_guards.zap import Zap, user_of
from envserve.settings import HostSettings
from envserve.wire.sockets import use_keys
from tests.envserve.strangers import UNKEYED, Stranger

SERVER, FRIEND, STRANGER = KeyPair.generate(), KeyPair.generate(), KeyPair.generate()
GRANT = Grant(name="ann", public=FRIEND.public)
INVITED = Grant(name="bob", public=FRIEND.public, until=9e9)
#: Within it, who is let in has been heard, on a machine that has other things to do.
PATIENCE = 20.0
#: Who was not heard by then may be taken for refused: so soon is who is let in.
SHORT = 0.3

Find = Callable[[bytes], Grant | None]


def find(public: bytes) -> Grant | None:
    return GRANT if public == FRIEND.public else None


class Door:
    """A router, and the handler of its keys."""

    def __init__(self, find: Find, binds: str = "tcp://127.0.0.1:0") -> None:
        self.loop = asyncio.get_running_loop()
        self.sockets = ServerSockets([binds], 1 << 20, self.loop, SERVER.secret)
        self.router = Router(self.sockets, SendBudget(0, 0))
        self.heard: list[tuple[Any, bytes]] = []
        self.come = asyncio.Event()
        self.zap: Zap | None = None
        if find is not None:
            door = self.sockets
            self.zap = Zap(door.context, find, self.loop, door.is_shut_out)
        self.sockets.listen()
        self.sockets.start_reading(self._read)

    def _read(self) -> None:
        while (received := self.router.receive()) is not None:
            self.heard.append((received[0], bytes(received[1][0])))
            self.come.set()

    @property
    def address(self) -> str:
        return self.sockets.addresses[0]

    async def hears(self, seconds: float) -> bool:
        """Tells whether anything has come by then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.come.wait()
        return bool(self.heard)

    def close(self) -> None:
        if self.zap is not None:
            self.zap.close()
        self.sockets.close()


@pytest.fixture
async def open_door() -> AsyncIterator[Callable[..., Door]]:
    """Opens doors, and closes them."""
    with contextlib.ExitStack() as stack:

        def open_(find: Any = find) -> Door:
            door = Door(find)
            stack.callback(door.close)
            return door

        yield open_


@pytest.fixture
def knock() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Has somebody connect, and say "let me in"."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = contextlib.ExitStack()

    def knock_(
        address: str, own: KeyPair | None, server: bytes = SERVER.public, **options: Any
    ) -> zmq.Socket[bytes]:
        socket = sockets.enter_context(context.socket(zmq.DEALER))
        if own is not None:
            use_keys(socket, server, own)
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(address)
        socket.send(b"let me in")
        return socket

    with sockets:
        yield knock_
    context.destroy(linger=0)


#: Who knocks: keyword arguments of `knock`.
STRANGERS: dict[str, dict[str, Any]] = {
    "no keys": {"own": None},
    "another key of the server": {"own": FRIEND, "server": STRANGER.public},
    "an unknown key": {"own": STRANGER},
    "a password": {"own": None, "PLAIN_USERNAME": b"ann", "PLAIN_PASSWORD": b"ann"},
    "a domain of its own": {"own": None, "ZAP_DOMAIN": b"envserve"},
}


@pytest.mark.parametrize("who", STRANGERS)
async def test_nobody_gets_in_but_who_is_known(
    open_door: Callable[..., Door], knock: Callable[..., Any], who: str
) -> None:
    door = open_door()
    knock(door.address, **STRANGERS[who])
    assert not await door.hears(SHORT)
    knock(door.address, FRIEND)
    assert await door.hears(PATIENCE)
    assert [(peer[-1], said) for peer, said in door.heard] == [("ann", b"let me in")]


@pytest.mark.parametrize("mechanism", UNKEYED)
async def test_nobody_gets_in_by_another_mechanism_than_keys(
    open_door: Callable[..., Door], mechanism: str
) -> None:
    door = open_door()
    with Stranger(door.address, None) as peer:
        peer.greet_by(mechanism)
        assert not await asyncio.to_thread(peer.gets_in)
    assert not door.sockets.has_unread()


def fail(public: bytes) -> None:
    raise OSError("the file is gone")


@pytest.mark.parametrize(
    ("handler", "is_stopped"),
    [(None, False), (find, True), (fail, False), (lambda public: None, False)],
    ids=["none", "stopped", "raises", "knows nobody"],
)
@pytest.mark.parametrize(
    "own", [STRANGER, FRIEND, None], ids=["unknown", "known", "no"]
)
async def test_in_doubt_nobody_gets_in(
    open_door: Callable[..., Door],
    knock: Callable[..., Any],
    handler: Find | None,
    is_stopped: bool,
    own: KeyPair | None,
) -> None:
    door = open_door(handler)
    if is_stopped and door.zap is not None:
        door.zap.close()
        door.zap = None
    knock(door.address, own)
    assert not await door.hears(SHORT)


async def test_a_handler_that_failed_goes_on_and_who_is_known_gets_in_later(
    open_door: Callable[..., Door], knock: Callable[..., Any]
) -> None:
    failures = 1

    def fail_first(public: bytes) -> Grant | None:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError("the file is gone")
        return find(public)

    door = open_door(fail_first)
    knock(door.address, FRIEND)
    assert await door.hears(PATIENCE)
    assert door.zap is not None
    assert door.zap.counts == {"300": 1, "200": 1}


async def test_who_was_invited_is_known_by_the_invitation_only(
    open_door: Callable[..., Door], knock: Callable[..., Any]
) -> None:
    door = open_door(lambda public: INVITED)
    knock(door.address, FRIEND)
    assert await door.hears(PATIENCE)
    (((*_, user), _),) = door.heard
    assert user == user_of(INVITED) != "bob"
    assert formats.decode(formats.INVITATION, user) == FRIEND.public


async def test_requests_that_are_malformed_are_answered(
    open_door: Callable[..., Door],
) -> None:
    door = open_door()
    assert door.zap is not None
    good = [b"1.0", b"7", b"envserve", b"127.0.0.1", b"", b"CURVE", FRIEND.public]
    asker = door.sockets.context.socket(zmq.REQ)
    asker.setsockopt(zmq.LINGER, 0)
    asker.connect("inproc://zeromq.zap.01")
    for index, (request, status) in enumerate(
        [
            (good, b"200"),
            ([*good[:6], STRANGER.public], b"400"),
            ([*good[:6], b"short"], b"300"),
            ([*good[:5], b"NULL"], b"300"),
            ([*good[:5], b"PLAIN", b"ann", b"ann"], b"300"),
            ([*good[:2], b"", *good[3:]], b"300"),
            ([b"2.0", *good[1:]], b"300"),
            ([b"1.0", b"7"], b"300"),
            ([b""], b"300"),
        ]
    ):
        asker.send_multipart(request)
        assert await asyncio.to_thread(asker.poll, int(1000 * PATIENCE))
        version, number, found, _, user, metadata = asker.recv_multipart()
        assert (found, user) == (status, b"" if index else b"ann"), request
        assert (version, metadata) == (b"1.0", b"")
        assert number == (b"7" if len(request) > 1 else b"")
    assert door.zap.counts == {"200": 1, "400": 1, "300": 7}
    asker.close()


async def test_a_server_that_would_let_strangers_in_does_not_begin(
    open_door: Callable[..., Door],
) -> None:
    door = open_door()
    assert door.zap is not None
    await check_unknown_key_refused(door.sockets, door.zap, SERVER.public)
    assert not door.zap.counts
    careless = open_door(lambda public: GRANT)
    assert careless.zap is not None
    with pytest.raises(SelfTestError, match="expected an unknown key to be"):
        await check_unknown_key_refused(careless.sockets, careless.zap, SERVER.public)


async def test_that_no_keys_are_used_is_said_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = sys.modules["envserve.server.serve"]
    monkeypatch.setattr(module, "_WARN_SECONDS", 0.0)
    open_to_all = HostSettings(binds=("tcp://127.0.0.1:1",), insecure_no_auth=True)
    warning = asyncio.create_task(module._warn_of_no_keys(open_to_all))
    for _ in range(3):
        await asyncio.sleep(0)
    warning.cancel()
    assert caplog.text.count("no keys are used") == 3


async def test_whose_messages_close_all_connections_is_kept_out_for_a_while(
    open_door: Callable[..., Door],
    knock: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = open_door()
    for count in range(1, 4):
        socket = knock(door.address, FRIEND)
        assert await door.hears(PATIENCE)
        socket.send_multipart([b""] * 60_000)
        async with asyncio.timeout(PATIENCE):
            while caplog.text.count("all connections are closed") < count:
                await asyncio.sleep(0.01)  # as the server does, between its turns
                door._read()
        door.come.clear()
        socket.close()
    assert "ann is rejected for 60 s" in caplog.text
    assert door.sockets.is_shut_out("ann")
    door.heard.clear()
    knock(door.address, FRIEND)
    assert door.zap is not None
    async with asyncio.timeout(PATIENCE):
        while not door.zap.counts["300"]:
            assert not await door.hears(SHORT)
    door.sockets._blamed["ann"] = [door.loop.time() - 61.0] * 3
    assert await door.hears(PATIENCE)


async def test_who_makes_most_of_many_connections_is_to_blame_for_their_number(
    open_door: Callable[..., Door],
) -> None:
    zap = open_door().zap
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


@pytest.mark.parametrize("is_of_number", [False, True])
async def test_nobody_is_to_blame_by_connections_for_what_is_not_their_number(
    open_door: Callable[..., Door],
    is_of_number: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = open_door()
    assert door.zap is not None
    monkeypatch.setattr(connection_watch, "_MIN_SHORTAGE_SECONDS", 0.0)
    monkeypatch.setattr(connection_watch, "_has_free_descriptor", lambda: False)
    most = 1 << 60 if is_of_number else -1
    watch = ConnectionWatch(door.loop, door.sockets, door.zap, lambda: most, 50)
    for count in range(1, 4):
        door.zap.num_admitted.update({"ann": 60})
        watch._check()
        assert door.sockets.num_reopened == count
        assert not door.zap.num_admitted
    watch.stop()
    assert door.sockets.is_shut_out("ann") is is_of_number
