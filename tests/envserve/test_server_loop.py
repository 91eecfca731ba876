"""The server's event loop logs failures, still replies to clients, and continues."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import zmq
import zmq.asyncio

from envserve.envs.registry import offered_names
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.server import deferred_replies, event_loop
from envserve.server.event_loop import ServerLoop
from envserve.server.fair_share import FairShare
from envserve.server.router import Router
from envserve.server.zmq_guards.send_budget import SendBudget
from envserve.server.zmq_guards.server_sockets import ServerSockets
from envserve.session.server.decisions import Decision, Reply, ResendLimiter
from envserve.session.server.server_protocol import ServerProtocol
from envserve.settings import HostSettings
from envserve.slab import Status
from envserve.wire.bodies import Attach, ResetBody
from envserve.wire.constants import ErrorCode, Executed, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello, Welcome
from envserve.wire.message import Buffer, Message, decode, encode
from envserve.wire.result_report import ResultReport
from envserve.wire.sockets import raise_file_limit

BOOT = 77
FAULTY = "envserve/Faulty-v0"
ATTACH = Attach(env_name="CartPole-v1", num_envs=4, seed=1).encode()


class Peer:
    """A DEALER socket that sends arbitrary messages."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, server_sockets: ServerSockets
    ) -> None:
        self.server_sockets = server_sockets
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(address)

    async def send(
        self, kind: MessageType, request: int, body: bytes = b"", **fields: Any
    ) -> None:
        numbers: dict[str, Any] = {
            "session": 5,
            "boot": BOOT,
            "epoch": 1,
            "request": request,
        }
        message = Message(type=kind, body=body, **numbers, **fields)
        await self.send_frames(encode(message))

    async def send_frames(self, frames: Sequence[Buffer]) -> None:
        await self._socket.send_multipart(frames)

    async def receive(self, *kinds: MessageType) -> Message:
        while True:
            async with asyncio.timeout(20):
                message = decode(await self._socket.recv_multipart())
            if message.type in kinds:
                return message

    async def request(
        self, kind: MessageType, reply: MessageType, body: bytes = b"", **fields: Any
    ) -> Message:
        await self.send(kind, 1, body, **fields)
        return await self.receive(reply)

    async def free_envs(self) -> int:
        body = Hello().encode()
        reply = await self.request(MessageType.HELLO, MessageType.WELCOME, body)
        return Welcome.decode(reply.body).free_envs


@asynccontextmanager
async def running(
    folder: Path,
    launcher: Launcher,
    kind: Callable[..., ServerProtocol] = ServerProtocol,
) -> AsyncIterator[tuple[ServerLoop, Peer]]:
    """Run a ServerLoop in this process, with a connected peer."""
    host = HostSettings(num_workers=2, allowed_kwargs=frozenset({"fault:any"}))
    names = offered_names(("CartPole-v1", FAULTY), ("tests.oracle.probe_envs",))
    protocol = kind(host, names, BOOT)
    peers = zmq.asyncio.Context()
    loop = asyncio.get_running_loop()
    sockets = ServerSockets([address := f"ipc://{folder}/socket"], 1 << 20, loop)
    sockets.listen()
    router = Router(sockets, SendBudget(0, 0))
    server_loop = ServerLoop(host, router, protocol, launcher, asyncio.Event())
    try:
        yield server_loop, Peer(peers, address, sockets)
    finally:
        await server_loop.stop(0.0)
        peers.destroy(linger=0)
        sockets.close()


class CountingProtocol(ServerProtocol):
    """A protocol that sets an event after 100 messages, too many for one turn."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.num_received = 0
        self.has_received_all = asyncio.Event()

    def receive(
        self, peer: tuple[Any, ...], frames: Sequence[Buffer], now: float
    ) -> list[Decision]:
        self.num_received += 1
        if self.num_received == 100:
            self.has_received_all.set()
        return super().receive(peer, frames, now)


class FailingProtocol(CountingProtocol):
    def receive(
        self, peer: tuple[Any, ...], frames: Sequence[Buffer], now: float
    ) -> list[Decision]:
        decisions = super().receive(peer, frames, now)
        if decode(frames).type is MessageType.PING:
            raise ValueError("truth value of an array")
        return decisions


async def all_received(server_loop: ServerLoop) -> None:
    protocol = server_loop._protocol
    assert isinstance(protocol, CountingProtocol)
    async with asyncio.timeout(20):
        await protocol.has_received_all.wait()


async def test_a_message_that_the_server_fails_to_handle_is_answered_and_logged(
    tmp_path: Path, launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, launcher, FailingProtocol) as (server_loop, peer):
        for _ in range(100):  # more than one turn reads
            await peer.send(MessageType.PING, 9)
        await all_received(server_loop)
        assert server_loop.counters.failures == 100
        for _ in range(100 - server_loop.dropped_replies):
            reply = await peer.receive(MessageType.ERROR)
            body = ErrorBody.decode(reply.body)
            assert reply.request == 9
            assert (body.code, body.executed) == (ErrorCode.INTERNAL, Executed.UNKNOWN)
        assert await peer.free_envs() == 128
    assert "ValueError: truth value of an array" in caplog.text
    assert len(caplog.records) < 10  # at most one line per second


class SlowProtocol(CountingProtocol):
    """A protocol that takes 1 ms per message, and counts each turn's messages."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.turn = 0
        self.turns: Counter[int] = Counter()

    def count_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        self.turn += 1
        loop.call_soon(self.count_turns, loop)

    def receive(
        self, peer: tuple[Any, ...], frames: Sequence[Buffer], now: float
    ) -> list[Decision]:
        self.turns[self.turn] += 1
        ends_at = time.monotonic() + 0.001
        while time.monotonic() < ends_at:
            pass
        return super().receive(peer, frames, now)


async def test_a_turn_of_messages_ends_after_two_milliseconds(
    tmp_path: Path, launcher: Launcher
) -> None:
    async with running(tmp_path, launcher, SlowProtocol) as (server_loop, peer):
        protocol = server_loop._protocol
        assert isinstance(protocol, SlowProtocol)
        protocol.count_turns(asyncio.get_running_loop())
        for _ in range(100):
            await peer.send(MessageType.PING, 9)
        await all_received(server_loop)
        # One asyncio turn can read twice: a scheduled read, and one for a new event.
        assert max(protocol.turns.values()) <= 2 * 2


class SlowestProtocol(ServerProtocol):
    """A protocol in which each message takes longer than a turn may last."""

    def receive(
        self, peer: tuple[Any, ...], frames: Sequence[Buffer], now: float
    ) -> list[Decision]:
        time.sleep(0.003)
        return super().receive(peer, frames, now)


async def test_a_slow_message_that_is_the_last_one_leaves_nothing_unread(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, messages of a client that waits for its replies may be dropped."""
    turns = []

    def end_turn(self: FairShare, has_unread: bool) -> float:
        turns.append(has_unread)
        return 0.0

    monkeypatch.setattr(FairShare, "end_turn", end_turn)
    async with running(tmp_path, launcher, SlowestProtocol) as (_, peer):
        for _ in range(3):
            await peer.free_envs()
    assert len(turns) >= 3
    assert not any(turns)


class BurstProtocol(ServerProtocol):
    """A protocol that replies 300 times, as to a request that lists 300 blocks."""

    def receive(
        self, peer: tuple[Any, ...], frames: Sequence[Buffer], now: float
    ) -> list[Decision]:
        return 300 * super().receive(peer, frames, now)


async def test_a_burst_of_replies_reaches_a_client_that_reads(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's queue for a client is full after 64 replies."""
    # ZeroMQ's threads may be slow on a busy machine.
    monkeypatch.setattr(deferred_replies, "MAX_PAUSE_SECONDS", 60.0)
    async with running(tmp_path, launcher, BurstProtocol) as (server_loop, peer):
        await peer.send(MessageType.PING, 9)
        for _ in range(300):
            assert (await peer.receive(MessageType.ERROR)).request == 9
        assert server_loop.dropped_replies == 0


async def test_a_waiting_reply_does_not_wait_for_the_retry_of_a_slower_peer(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers, attempts = asyncio.Queue[object](), list[object]()

    def send(self: Router, receiver: object, frames: object) -> bool:
        attempts.append(receiver)
        receivers.put_nowait(receiver)
        self.is_full = len(attempts) <= 2  # the first attempt for each peer
        return not self.is_full

    monkeypatch.setattr(Router, "send", send)
    context = zmq.asyncio.Context()
    async with running(tmp_path, launcher) as (_, slow):
        fast = Peer(context, f"ipc://{tmp_path}/socket", slow.server_sockets)
        for peer, pause in (slow, 600.0), (fast, 0.001):
            monkeypatch.setattr(deferred_replies, "MIN_PAUSE_SECONDS", pause)
            await peer.send(MessageType.PING, 9)
            async with asyncio.timeout(20):
                receiver = await receivers.get()
        async with asyncio.timeout(20):
            assert await receivers.get() == receiver
        context.destroy(linger=0)


class OverdueProtocol(ServerProtocol):
    """A protocol whose leases are overdue, as after a suspension of the process."""

    def __init__(self, protocols: list[OverdueProtocol], *arguments: Any) -> None:
        super().__init__(*arguments)
        protocols.append(self)
        self.scheduled_at = 0.0
        self.expired_at: asyncio.Future[float] = asyncio.Future()

    def next_deadline(self) -> float:
        self.scheduled_at = self.scheduled_at or time.monotonic()
        return time.monotonic() - 5.0

    def expire_leases(self, now: float) -> list[Decision]:
        if not self.expired_at.done():
            self.expired_at.set_result(now)
        return []


async def test_messages_are_read_before_leases_expire_after_a_suspension(
    tmp_path: Path, launcher: Launcher
) -> None:
    protocols: list[OverdueProtocol] = []
    async with running(
        tmp_path, launcher, lambda *args: OverdueProtocol(protocols, *args)
    ) as (_, peer):
        await peer.send(MessageType.ATTACH, 1, ATTACH)
        async with asyncio.timeout(20):
            assert await protocols[0].expired_at > protocols[0].scheduled_at + 0.4


async def test_leases_expire_although_the_loop_is_always_late(
    tmp_path: Path, launcher: Launcher
) -> None:
    protocols: list[OverdueProtocol] = []
    loop = asyncio.get_running_loop()

    def block() -> None:
        time.sleep(0.9)
        if not protocols[0].expired_at.done():
            loop.call_later(0.3, block)

    async with running(
        tmp_path, launcher, lambda *args: OverdueProtocol(protocols, *args)
    ) as (_, peer):
        await peer.send(MessageType.ATTACH, 1, ATTACH)
        loop.call_soon(block)
        async with asyncio.timeout(20):
            await protocols[0].expired_at


async def test_messages_that_arrive_while_a_key_is_revoked_are_read(
    tmp_path: Path, launcher: Launcher
) -> None:
    async with running(tmp_path, launcher) as (server_loop, peer):
        await peer.send(MessageType.HELLO, 1, Hello().encode())
        while not peer.server_sockets.has_unread():
            pass  # each call consumes the event that wakes up the loop
        server_loop.end_sessions(["client-1"])
        await peer.receive(MessageType.WELCOME)


async def test_a_draining_server_closes_the_connections_of_revoked_clients(
    tmp_path: Path, launcher: Launcher
) -> None:
    async with running(tmp_path, launcher) as (server_loop, peer):
        await server_loop.drain(3600.0)
        server_loop.disconnect(["client-1"])
        assert peer.server_sockets.num_reopened == 1


async def test_a_message_that_is_completely_discarded_closes_no_connections(
    tmp_path: Path, launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, launcher) as (_, peer):
        # The server discards a thousand frames at a time, and gives up after 50,000.
        await peer.send_frames([encode(Message(type=MessageType.PING))[0]] * 50_500)
        await peer.receive(MessageType.ERROR)
        assert await peer.free_envs() == 128
    assert "closed all connections" not in caplog.text


async def test_too_many_open_files_end_only_one_session(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(event_loop, "Pool", fail)
    async with running(tmp_path, launcher) as (_, peer):
        reply = await peer.request(MessageType.ATTACH, MessageType.ERROR, ATTACH)
        body = ErrorBody.decode(reply.body)
        assert body.code is ErrorCode.ENV_START_FAILED
        assert "Too many open files" in body.text
        assert "ulimit -n" in body.text
        assert await peer.free_envs() == 128


async def test_a_failure_in_a_pool_ends_only_its_session(
    tmp_path: Path,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the pool broke")

    async with running(tmp_path, launcher) as (server_loop, peer):
        monkeypatch.setattr(Pool, "collect", fail)
        reply = await peer.request(MessageType.ATTACH, MessageType.ERROR, ATTACH)
        body = ErrorBody.decode(reply.body)
        assert body.code is ErrorCode.INTERNAL
        assert "the pool broke" in body.text
        assert await peer.free_envs() == 128
        assert server_loop.counters.failures == 1
    assert "RuntimeError: the pool broke" in caplog.text


async def test_a_failure_in_a_pool_does_not_wait_until_its_envs_are_closed(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the pool broke")

    kwargs = {"fault": "hang_in_close"}
    attach = Attach(env_name=FAULTY, num_envs=1, seed=1, env_kwargs=kwargs)
    resets = ResetBody(resets=((None, None),)).encode()
    async with running(tmp_path, launcher) as (_, peer):
        await peer.request(MessageType.ATTACH, MessageType.GRANTED, attach.encode())
        monkeypatch.setattr(Pool, "collect", fail)
        began_at = time.monotonic()
        await peer.send(MessageType.RESET, 2, resets, entries=((0, 1),))
        await peer.receive(MessageType.ERROR)
        assert time.monotonic() - began_at < 5.0  # local envs have 10 s


async def test_a_request_whose_reply_cannot_be_built_gets_an_error(
    tmp_path: Path,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the sum broke")

    async with running(tmp_path, launcher) as (server_loop, peer):
        monkeypatch.setattr(server_loop.status, "report", fail)
        reply = await peer.request(MessageType.STATUS, MessageType.ERROR)
        body = ErrorBody.decode(reply.body)
        assert (body.code, body.executed) == (ErrorCode.INTERNAL, Executed.UNKNOWN)
        assert await peer.free_envs() == 128
        assert server_loop.counters.failures == 1
    assert "RuntimeError: the sum broke" in caplog.text


async def test_a_dead_workers_block_is_absent_and_then_lost(
    tmp_path: Path, launcher: Launcher
) -> None:
    kinds = MessageType
    resets = ResetBody(resets=((None, None), (None, None))).encode()
    async with running(tmp_path, launcher) as (server_loop, peer):
        await peer.request(kinds.ATTACH, kinds.GRANTED, ATTACH)
        first = ((0, 1), (1, 1))
        await peer.request(kinds.RESET, kinds.RESULT, resets, entries=first)
        (leased,) = server_loop.pools.values()
        pid = leased.pool.worker_pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        actions = bytes(4 * 8)
        await peer.send(kinds.STEP, 2, actions, entries=((0, 2), (1, 2)))
        replies = [await peer.receive(kinds.ABSENT, kinds.RESULT) for _ in range(3)]
        received = [(reply.type, reply.entries) for reply in replies]
        assert sorted(received[:2]) == [
            (kinds.RESULT, ((0, 2),)),
            (kinds.ABSENT, ((1, 2),)),
        ]
        assert received[2] == (kinds.RESULT, ((1, 2),))
        (fault, _) = ResultReport.decode(replies[2].report).faults
        assert (fault.env_index, fault.status) == (2, Status.WORKER_DIED)
        # The next step succeeds, and one reply again contains both blocks.
        await peer.send(kinds.STEP, 3, actions, entries=((0, 3), (1, 3)))
        result = await peer.receive(kinds.ABSENT, kinds.RESULT)
        assert (result.type, len(result.entries)) == (kinds.RESULT, 2)


async def test_a_step_makes_few_function_calls(
    tmp_path: Path, launcher: Launcher
) -> None:
    """Calls cause cache misses, because simulations run between two steps."""
    kinds, counts = MessageType, []
    resets = ResetBody(resets=((None, None), (None, None))).encode()
    async with running(tmp_path, launcher) as (_, peer):
        await peer.request(kinds.ATTACH, kinds.GRANTED, ATTACH)
        first = ((0, 1), (1, 1))
        await peer.request(kinds.RESET, kinds.RESULT, resets, entries=first)
        for seq in range(2, 32):
            called: list[str] = []

            def record(
                frame: FrameType, event: str, _: object, called: list[str] = called
            ) -> None:
                caller: FrameType | None = frame
                while caller and caller.f_code.co_filename != event_loop.__file__:
                    caller = caller.f_back
                if event == "call" and caller:
                    called.append(frame.f_code.co_qualname)

            sys.setprofile(record)
            entries = ((0, seq), (1, seq))
            await peer.send(kinds.STEP, seq, bytes(4 * 8), entries=entries)
            await peer.receive(kinds.RESULT)
            sys.setprofile(None)
            counts.append(len(called))
    # 70 if the two workers reply one by one; fewer if they reply together.
    assert 0 < min(counts) <= 70, counts


async def test_a_copy_that_could_not_be_sent_is_not_counted(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, launcher) as (server_loop, _):
        limiter = ResendLimiter()
        monkeypatch.setattr(server_loop._router, "send", lambda *_: False)
        for now in range(20):
            assert limiter.allow(float(now))
            server_loop._carry_out([Reply((1, b"r", ""), [b"?"], limiter)])
        assert limiter.num_copies == 0
        assert not limiter.allow(19.5)
        monkeypatch.undo()


async def test_other_decisions_are_carried_out_if_a_reply_fails(
    tmp_path: Path,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[object] = []

    def send(_: object, frames: Sequence[Buffer]) -> bool:
        if frames == [b"bad"]:
            raise zmq.ZMQError(errno.EFAULT)
        sent.extend(frames)
        return True

    caplog.set_level(logging.INFO, "envserve.server.event_loop")
    async with running(tmp_path, launcher) as (server_loop, _):
        monkeypatch.setattr(server_loop._router, "send", send)
        server_loop._carry_out([Reply((1, b"r", ""), [f]) for f in (b"bad", b"good")])
        assert sent == [b"good"]
        assert (server_loop.counters.failures, server_loop.dropped_replies) == (1, 1)
        monkeypatch.undo()
    assert "a reply could not be sent" in caplog.text
    (end,) = (r for r in caplog.records if r.message.startswith("replies to"))
    assert end.levelno == logging.INFO  # usual when clients exit


async def test_dropped_messages_are_logged_at_the_end(
    tmp_path: Path, launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "envserve.server.event_loop"):
        async with running(tmp_path, launcher) as (_, peer):
            await peer.send(MessageType.RESULT, 1)
            assert await peer.free_envs() == 128
    assert "unanswerable messages: 1" in caplog.text
    assert "replies to clients" not in caplog.text


async def test_a_stop_shortens_the_time_limit_of_closing_workers(
    tmp_path: Path,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(event_loop, "_CLOSE_SECONDS", 3600.0)
    attach = Attach(
        env_name=FAULTY, num_envs=1, seed=1, env_kwargs={"fault": "hang_in_close"}
    )
    async with running(tmp_path, launcher) as (server_loop, peer):
        await peer.request(MessageType.ATTACH, MessageType.GRANTED, attach.encode())
        await peer.send(MessageType.DETACH, 2)
        await peer.request(MessageType.HELLO, MessageType.WELCOME, Hello().encode())
        await server_loop.stop(2.0)
        await peer.receive(MessageType.DETACHED)
    assert "stopped before" not in caplog.text


def test_the_limit_of_open_files_is_raised_to_its_maximum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    for _ in range(2):
        raise_file_limit()
    assert limits == [(256, 4096), (4096, 4096)]
