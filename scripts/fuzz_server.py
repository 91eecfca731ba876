"""Send malformed messages to a server over a socket, most of them within a session.

    python scripts/fuzz_server.py                       a million messages, with keys
    python scripts/fuzz_server.py --insecure            a million messages, without keys
    python scripts/fuzz_server.py --messages 50000      some minutes

Another client steps at the same time. Exits with 1 if a reply is not a valid message
of a server, if fewer than 3 % of the replies are results, if the server fails or its
memory grows, or if a row of the other client is wrong.
"""

import itertools
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import numpy as np
import typer
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.attacks import Goals
from benchmarks.support.processes import temporary_keys
from envserve.wire.bodies import Attach, CallBody, Pong, ResetBody
from envserve.wire.constants import MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello, Welcome
from envserve.wire.message import Buffer, Message, decode, encode
from envserve.wire.result_report import ResultReport
from tests.envserve.server_process import LEDGER, ServerProcess, use_user_keys
from tests.envserve.session_fakes import make_call
from tests.envserve.test_fuzz_server import (
    messages_of_odd_values,
    mutated_messages,
    random_messages,
    valid_messages,
)
from tests.envserve.zmtp_peers import honest_client

NUM_ENVS: Final = 4
NUM_BLOCKS: Final = 2
ACTIONS: Final = bytes(8 * NUM_ENVS)
RESET: Final = ResetBody(resets=((None, None),) * NUM_BLOCKS).encode()
OPTIONS: Final = (
    *("--allow-kwarg", "length", "--expose", "echo", "--drain-grace", "0"),
    *("--log-level", "error"),
)
MAX_GROWTH_MIB: Final = 32.0
MIN_RESULTS: Final = 0.03
#: Timeout of a request. Leases that malformed messages have acquired expire earlier.
_TIMEOUT_SECONDS: Final = 150.0


class FuzzingClient:
    """A client that keeps a session usable, and validates and counts all replies.

    Attributes:
      replies: Maps message types to the number of replies of that type.
      num_sent: Number of malformed messages.
      num_valid_results: Number of replies to valid steps and resets.
      num_leases: Number of leases requested, because malformed messages end leases.
    """

    def __init__(self, address: str, *, is_insecure: bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, int(1000 * _TIMEOUT_SECONDS))
        if not is_insecure:
            use_user_keys(self._socket, address)
        self._socket.connect(address)
        self.replies: Counter[str] = Counter()
        self.num_sent = self.num_valid_results = self.num_leases = 0
        self.boot = self.epoch = 0
        self.session = 0x2345_6789_ABCD_0000
        self._random = Random(0)
        self._seqs = [0] * NUM_BLOCKS
        self._has_lease = False
        self._last_step: Message | None = None
        reply = self._ask(MessageType.HELLO, body=Hello().encode())
        self.boot = reply.boot

    def send_malformed(self, frames: Sequence[Buffer]) -> None:
        self._socket.send_multipart(frames)
        self.num_sent += 1
        while self._socket.poll(0):
            self._read()

    def in_session(self) -> list[list[Buffer]]:
        """Return messages that are valid in the current state of the session."""
        call = CallBody.from_calls([make_call([0], "call", "echo", 1.5)]).encode()
        step = self._message(MessageType.STEP, self._next(), ACTIONS)
        if self._last_step is not None:
            attempt = self._last_step.attempt + 1
            self._last_step = replace(self._last_step, attempt=attempt)
        messages = [
            *[step] * 3,
            *[self._last_step or step] * 3,  # copies, which get the same reply
            self._message(MessageType.STEP, self._next()[:1], ACTIONS[: 8 * 2]),
            self._message(MessageType.RESET, self._next(), RESET),
            self._message(MessageType.CALL, self._next()[:1], call),
            self._message(MessageType.PING),
        ]
        return [encode(message) for message in messages]

    def step(self) -> None:
        """Step all envs once; get another lease first if necessary."""
        while not self._is_idle():
            self._socket.poll(10)  # wait until operations in progress are complete
        if not self._has_lease:
            self._attach()
        self._last_step = self._message(MessageType.STEP, self._next(), ACTIONS)
        reply = self._request(self._last_step)
        self.num_valid_results += reply.type is MessageType.RESULT

    def _is_idle(self) -> bool:
        """Return whether no operation of the lease is in progress."""
        if not self._has_lease:
            return True
        reply = self._ask(MessageType.PING)
        # A malformed message may have ended the session.
        self._has_lease = reply.type is MessageType.PONG
        return not (self._has_lease and Pong.decode(reply.body).running)

    def _attach(self) -> None:
        self.session += 1
        self.num_leases += 1
        body = Attach(env_name=LEDGER, num_envs=NUM_ENVS, seed=1).encode()
        self.epoch = 0
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            reply = self._ask(MessageType.ATTACH, body=body)
            if reply.type is MessageType.GRANTED:
                break
            assert time.monotonic() < deadline, reply
            time.sleep(0.1)  # until leases of malformed messages have ended
        self.epoch, self._seqs, self._has_lease = reply.epoch, [0] * NUM_BLOCKS, True
        reply = self._ask(MessageType.RESET, self._next(), RESET)
        self.num_valid_results += reply.type is MessageType.RESULT

    def _next(self) -> tuple[tuple[int, int], ...]:
        return tuple((block, seq + 1) for block, seq in enumerate(self._seqs))

    def _message(
        self, kind: MessageType, entries: Any = (), body: bytes = b""
    ) -> Message:
        return Message(
            kind,
            session=self.session,
            boot=self.boot,
            epoch=self.epoch,
            # A malformed message never has the same number as a later valid one, so
            # its reply is not mistaken for the reply to the valid one.
            request=self._random.getrandbits(64),
            entries=entries,
            body=body,
        )

    def _ask(self, kind: MessageType, entries: Any = (), body: bytes = b"") -> Message:
        return self._request(self._message(kind, entries, body))

    def _request(self, message: Message) -> Message:
        """Send a valid message, and return the final reply to it."""
        self._socket.send_multipart(encode(message))
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if self._socket.poll(1000):
                reply = self._read()
                is_final = reply.type is not MessageType.BUILDING
                if reply.request == message.request and is_final:
                    return reply
        raise AssertionError(f"expected a reply to {message!r}; got none")

    def _read(self) -> Message:
        """Receive a reply, and check that it is valid."""
        reply = decode(self._socket.recv_multipart())
        kind = reply.type
        assert isinstance(kind, MessageType), f"expected a known type; got {reply!r}"
        assert kind >= MessageType.WELCOME, (
            f"expected the type of a reply; got {reply!r}"
        )
        self.replies[kind.name] += 1
        is_current = (reply.session, reply.epoch) == (self.session, self.epoch)
        if kind is MessageType.ERROR:
            error = ErrorBody.decode(reply.body)
            self.replies[f"ERROR {error.code.name}"] += 1
        elif kind is MessageType.WELCOME:
            Welcome.decode(reply.body)
        elif kind in (MessageType.RESULT, MessageType.CALL_RESULT):
            if reply.report:
                ResultReport.decode(reply.report)
            for block, seq in reply.entries if is_current else ():
                self._seqs[block] = max(self._seqs[block], seq)
        return reply

    def close(self) -> None:
        self._context.destroy(linger=0)


def malformed_rounds(
    client: FuzzingClient, random: np.random.Generator
) -> Iterator[list[Sequence[Buffer]]]:
    """Yield lists of malformed messages; most of them belong to the session."""
    inside = client.in_session()
    outside = valid_messages(client.boot)
    mutated, arbitrary = mutated_messages(inside, random), random_messages(random)
    mutated_outside = mutated_messages(outside, random)
    while True:
        odd = messages_of_odd_values(client.boot, client.epoch, random, client.session)
        inside[:] = client.in_session()
        yield [
            *itertools.islice(mutated, 14),
            *itertools.islice(mutated_outside, 2),
            *itertools.islice(odd, 2),
            *itertools.islice(arbitrary, 2),
        ]


def main(
    messages: Annotated[int, typer.Option(help="Number of messages.")] = 10**6,
    seed: Annotated[int, typer.Option(help="Seed of the messages.")] = 0,
    insecure: Annotated[bool, typer.Option(help="Do not use keys.")] = False,
) -> None:
    goals = Goals()
    options = (*OPTIONS, *(("--insecure-no-auth",) if insecure else ()))
    with (
        temporary_keys(),
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(Path(folder), *options) as server,
    ):
        client = FuzzingClient(server.address, is_insecure=insecure)
        started, before = time.monotonic(), 0
        with honest_client(server) as other:
            for sent in malformed_rounds(client, np.random.default_rng(seed)):
                for frames in sent:
                    client.send_malformed(frames)
                client.step()
                if not before and client.num_sent >= messages // 20:
                    before = server.resident_bytes
                if client.num_sent >= messages:
                    break
        seconds = time.monotonic() - started
        growth = (server.resident_bytes - before) / 2**20
        client.close()
        log = server.end(signal.SIGTERM)
    print(f"{client.num_sent:,} malformed messages in {seconds:.0f} s", flush=True)
    print(f"{client.num_leases:,} leases; other client: {len(other.seconds):,} steps")
    for name, count in client.replies.most_common():
        print(f"{name:24} {count:9,}")
    num_replies = sum(n for name, n in client.replies.items() if " " not in name)
    num_results = client.replies[MessageType.RESULT.name]
    goals.at_least("results / replies", num_results / num_replies, MIN_RESULTS)
    num_malformed = num_results - client.num_valid_results
    print(f"results of malformed messages: {num_malformed / num_replies:.1%}")
    goals.at_most("growth of the server (MiB)", growth, MAX_GROWTH_MIB)
    goals.at_most("tracebacks in the server's log", log.count("Traceback"), 0)
    sys.exit(goals.report())


if __name__ == "__main__":
    typer.run(main)
