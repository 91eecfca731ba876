"""What docs/protocol.md asks of a server: a function each, whose docstring says it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from envserve.check.probe_client import (
    ProbeClient,
    ServerUnderTest,
    SkipRule,
    describe,
    expect,
)
from envserve.envs.seeding import env_seed
from envserve.errors import EnvserveError, RemoteProtocolError
from envserve.lane import Call
from envserve.spaces import codec
from envserve.wire.bodies import CallBody, Pong
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.handshake import Hello
from envserve.wire.message import Message, encode

_MOST_STEPS: Final = 1000
_MOST_SILENCE: Final = 5.0
_BAD: Final = ErrorCode.BAD_MESSAGE
_Check = Callable[[ProbeClient], object]


class CheckResult(NamedTuple):
    """The result of one rule: "ok", "fail" or "skipped", and the reason."""

    name: str
    section: str
    title: str
    outcome: str = "ok"
    why: str = ""


#: The check of each rule, and whether it runs within a lease that must be unaffected.
RULES: Final[dict[CheckResult, tuple[_Check, bool]]] = {}


def rule(section: str, *, disturbs: bool = False) -> Callable[[_Check], _Check]:
    """Register a check in `RULES`, with its section of docs/protocol.md."""

    def register(function: _Check) -> _Check:
        title = str(function.__doc__).rstrip(".")
        RULES[CheckResult(function.__name__, section, title)] = function, disturbs
        return function

    return register


def check(subject: ServerUnderTest) -> Iterator[CheckResult]:
    """Check all rules; every lease is returned.

    Raises:
      RemoteProtocolError: The server does not answer any more.
    """
    for result, (function, disturbs) in RULES.items():
        client = subject.client()
        client.hello()
        try:
            if disturbs:
                client.begin()
            function(client)
            if disturbs:
                client.follow()
            subject.close_clients()
        except SkipRule as error:
            result = result._replace(outcome="skipped", why=str(error))
        except EnvserveError as error:
            result = result._replace(outcome="fail", why=str(error))
        with contextlib.suppress(EnvserveError):
            subject.close_clients()
        yield result


# Who the server is.


@rule("WELCOME")
def welcome(c: ProbeClient) -> None:
    """HELLO is answered by a WELCOME that holds together."""
    told = c.subject.welcome
    expect(told.min_version <= 2 <= told.max_version, "version 2", told)
    expect(told.free_envs <= told.total_envs, "no more free than there are", told)
    expect(len(told.env_names) <= told.num_names, "as many names as it says", told)
    boot = c.hello(request=1 << 40, attempt=7).boot
    expect(boot == c.subject.boot, "the boot id to stay", boot)


@rule("WELCOME")
def versions(c: ProbeClient) -> None:
    """Clients of other versions are told so, in their own."""
    body = Hello(min_version=200, max_version=201).encode()
    for version in (2, 200):
        hello = c.message(MessageType.HELLO, body, version=version)
        c.expect_error(hello, ErrorCode.VERSION_MISMATCH)


@rule("Types", disturbs=True)
def types(c: ProbeClient) -> None:
    """Unknown types are UNSUPPORTED; a server's own, and junk, are dropped."""
    c.expect_error(c.message(127), ErrorCode.UNSUPPORTED)
    for frames in ([b""], [b"x" * 99], [b"", b"", b""], [b"ENVS"]):
        c.link.send(frames)
    c.send(c.message(MessageType.WELCOME), c.message(255))
    expect(not (came := c.receive_all()), "no answer", [*map(describe, came)])


@rule("Frame 0", disturbs=True)
def lengths(c: ProbeClient) -> None:
    """A frame 0 of another length than it says, or with too much in it, is refused."""
    ping = c.message(MessageType.PING)
    c.expect_error(ping, _BAD, sent=[bytes(encode(ping)[0]) + b"x"])
    c.expect_error(c.message(MessageType.ATTACH, bytes(5000)), _BAD)
    c.expect_error(c.message(MessageType.STEP, entries=((0, 1),) * 5000), _BAD)


@rule("Limits", disturbs=True)
def long_messages(c: ProbeClient) -> None:
    """Too long a frame, or too many frames, harm nobody else."""
    ping = encode(c.message(MessageType.PING))
    for frames in ([bytes(c.subject.welcome.max_message_bytes + 4096)], ping * 9):
        link = c.subject.open_link()
        link.send(frames)
        link.receive(0.1)
        link.close()


# Who gets envs.


def _attach(c: ProbeClient, **fields: Any) -> Message:
    asked = {"env_name": c.subject.env_name, "num_envs": 2, "seed": 3}
    return c.message(MessageType.ATTACH, codec.encode({**asked, **fields}), epoch=0)


@rule("Msgpack")
def encodings(c: ProbeClient) -> None:
    """What is no msgpack, or too much of it, is refused; unknown fields are ignored."""
    deep = b"\x91" * 40 + b"\xc0"
    for body in (b"", b"\xc1", b"\x81", deep, b"\xdd\xff\xff\xff\xff", b"\xd4\5\0"):
        c.expect_error(c.message(MessageType.ATTACH, body), _BAD)
    c.grant(_attach(c, of_a_later_version=[1, {"a": None}]))
    c.ask(c.message(MessageType.DETACH), MessageType.DETACHED)


@rule("ATTACH")
def asked_wrongly(c: ProbeClient) -> None:
    """An ATTACH that cannot be is refused, by the code for that."""
    for changes in ({"num_envs": 0}, {"seed": -1}, {"autoreset": "?"}, {"seed": "7"}):
        c.expect_error(_attach(c, **changes), _BAD)
    others = ErrorCode.UNKNOWN_ENV, ErrorCode.ENVS_BUSY, ErrorCode.REFUSED
    c.expect_error(_attach(c, env_name="no-such-env"), *others[::2])
    c.expect_error(_attach(c, num_envs=1 << 16), *others[1:])


@rule("GRANTED")
def granted(c: ProbeClient) -> None:
    """Envs are granted, their spaces can be read, and blocks partition the rows."""
    try:
        splits = {block.split for block in c.attach().blocks}
    except SkipRule as error:
        raise RemoteProtocolError(f"expected GRANTED; got {error}") from None
    expect(splits <= {0, 1}, "splits 0 and 1", splits)


@rule("Rules of the server", disturbs=True)
def attached_again(c: ProbeClient) -> None:
    """2: A copy of ATTACH changes nothing; one with another body is refused."""
    copy = replace(c.attached, attempt=c.attached.attempt + 1)
    answer = c.ask(copy, MessageType.GRANTED, MessageType.BUILDING)
    is_same = answer.body == c.granted or answer.type is MessageType.BUILDING
    expect(is_same, "the same GRANTED", "another")
    c.expect_error(_attach(c, num_envs=1), _BAD)


@rule("Rules of the server", disturbs=True)
def fenced(c: ProbeClient) -> None:
    """1: Another boot id or epoch is FENCED; an unknown session has no lease."""
    for message in (c.message(MessageType.PING), c.next_step()):
        c.expect_error(replace(message, boot=c.subject.boot ^ 2), ErrorCode.FENCED)
        c.expect_error(replace(message, epoch=c.epoch + 1), ErrorCode.FENCED)
    stranger = c.subject.client()
    stranger.expect_error(stranger.message(MessageType.PING), ErrorCode.LEASE_LOST)


@rule("Rules of the server", disturbs=True)
def apart(c: ProbeClient) -> None:
    """2: Sessions do not see each other."""
    other = c.subject.client().attach(seed=12)
    for raw in c.subject.reference[c.num_steps : -3]:
        other.step()
        expect(c.step().raw == raw, "rows of its own seed", "others")


# At most once.


@rule("Rules of the server", disturbs=True)
def copies(c: ProbeClient) -> None:
    """4: A copy of a request is answered alike, once, and not carried out again."""
    c.link.receive(1.1)
    again = c.read(c.ask(replace(c.last, attempt=1)))
    expect(again.raw == c.last_result.raw, "the same rows", "others")
    c.link.receive(1.1)  # rows are sent again at most once a second
    c.send(replace(c.last, attempt=1))
    came = [*map(describe, c.receive_all())]
    expect(not came, "each attempt to be answered once", came)


@rule("Rules of the server", disturbs=True)
def joined(c: ProbeClient) -> None:
    """4: A copy joins a request that still runs."""
    step = c.next_step()
    num_copies = [replace(step, attempt=number) for number in (1, 1, 2)]
    came = [c.execute(step, *num_copies), *map(c.read, c.receive_all())]
    expect(len({played.raw for played in came}) == 1, "equal answers", "different")
    expect(len(came) <= 3, "an answer for each attempt at most", len(came))


@rule("Transport", disturbs=True)
def other_ways(c: ProbeClient) -> None:
    """A client may come back by another connection; answers go there."""
    former, c.link = c.link, c.subject.open_link()
    again = c.read(c.ask(replace(c.last, attempt=1)))
    expect(again.raw == c.last_result.raw, "the same rows", "others")
    former.close()


@rule("Rules of the server", disturbs=True)
def seqs(c: ProbeClient) -> None:
    """4: A seq that is too high is a GAP; an old one is ignored."""
    ahead, last, old = (
        replace(c.next_step(), entries=tuple((b, s + by) for b, s in enumerate(c.seqs)))
        for by in (2, 0, -1)
    )
    c.expect_error(ahead, ErrorCode.GAP)
    c.send(last, old)
    expect(not (came := c.receive_all()), "no answer", [*map(describe, came)])


# Steps and resets.


@rule("STEP", disturbs=True)
def bad_steps(c: ProbeClient) -> None:
    """A STEP of wrong size, or of blocks that are not there, is refused."""
    (block, seq), *others = c.next_step().entries
    for entries in ((), ((4000, 1), *others), ((block, seq), (block, seq))):
        c.expect_error(replace(c.next_step(), entries=entries), _BAD)
    for body in (c.last.body + b"\0", c.last.body[:-1]):
        c.expect_error(replace(c.next_step(), body=body), _BAD)


@rule("STEP", disturbs=True)
def bad_actions(c: ProbeClient) -> None:
    """An action outside its space is refused."""
    leaf = c.spec.action_leaves[0]
    is_float, most = leaf.dtype.kind == "f", np.max(leaf.limits[1], initial=1)
    is_any = leaf.is_encoded or leaf.dtype.kind == "b"
    if is_any or (not is_float and most == np.iinfo(leaf.dtype).max):
        raise SkipRule("its actions may be anything")
    c.expect_error(
        c.next_step(np.nan if is_float else most + 1), ErrorCode.INVALID_ACTION
    )


@rule("ATTACH")
def equal_seeds(c: ProbeClient) -> None:
    """Equal seeds give equal episodes."""
    try:
        _ = c.subject.reference
    except SkipRule as error:
        raise RemoteProtocolError(f"expected equal seeds to count; {error}") from None


def _seeded(c: ProbeClient, seeds: Any) -> dict[int, Any]:
    return {b.index: (None, tuple(seeds[b.start : b.stop])) for b in c.blocks}


def _at(leaves: Any, row: int) -> list[bytes]:
    return [leaf[row].tobytes() for leaf in leaves]


@rule("ATTACH")
def first_seeds(c: ProbeClient) -> None:
    """The first reset has the seed of root seed, row and incarnation."""
    _ = c.subject.reference
    c.attach(seed=5, first_env_index=7, first_incarnation=3)
    seeds = [env_seed(5, 7 + row, 3) for row in range(4)]
    given = c.subject.client().attach()
    is_same = given.reset(_seeded(given, seeds)).raw == c.first.raw
    expect(is_same, f"what the seeds {seeds} give", "something else")


@rule("RESET")
def given_seeds(c: ProbeClient) -> None:
    """A seed that is given is used, and rows that are not listed stay as they are."""
    _ = c.subject.reference
    first = c.attach().reset(_seeded(c, range(4)))
    before = c.step()
    after = c.reset({0: ((0,), (0,))})
    for row, old in ((0, first), (1, before)):
        is_same = _at(after.rows.observation, row) == _at(old.rows.observation, row)
        expect(is_same, f"row {row} to be of seed 0, and others to stay", "otherwise")


# Ends of episodes.


def _end(c: ProbeClient, autoreset: str) -> tuple[int, list[bytes]]:
    """Plays until a row ends; returns it, and the first observation that is to follow.

    In same_step that follows at once; here the last one has to be shown till then.
    """
    _ = c.subject.reference
    for client, mode in ((c.subject.client(), "same_step"), (c, autoreset)):
        played = client.attach(autoreset=mode).first
        while not (ended := played.rows.terminated | played.rows.truncated).any():
            if client.num_steps == _MOST_STEPS:
                raise SkipRule(f"no episode has ended within {_MOST_STEPS:,} steps")
            played = client.step()
        row, rows = int(ended.argmax()), played.rows
        if client is not c:
            final, first = _at(rows.final_observation, row), _at(rows.observation, row)
    for leaves in (rows.observation, rows.final_observation):
        expect(_at(leaves, row) == final, "the last observation", "another")
    return row, first


@rule("ATTACH")
def next_step(c: ProbeClient) -> None:
    """next_step: an ended row shows its last observation; the next STEP resets it."""
    row, first = _end(c, "next_step")
    rows = c.step().rows
    expect(_at(rows.observation, row) == first, "the first observation", "another")
    told = rows.reward[row], rows.terminated[row], rows.truncated[row]
    expect(not any(told), "reward 0 and no end", told)


@rule("ATTACH")
def disabled(c: ProbeClient) -> None:
    """disabled: an ended row shows its last observation; a RESET is to follow."""
    row, first = _end(c, "disabled")
    (block,) = (b.index for b in c.blocks if b.start <= row < b.stop)
    rows = c.reset({block: ((row,), None)}).rows
    expect(_at(rows.observation, row) == first, "the next episode", "another")


# What else can be asked.


@rule("CALL", disturbs=True)
def calls(c: ProbeClient) -> None:
    """A CALL of what is not exposed is refused."""
    hidden = CallBody.from_calls([Call(0, (0,), "get", "_hidden", b"\x92\x90\x80")])
    call = c.operation(MessageType.CALL, [0], hidden.encode())
    c.expect_error(call, ErrorCode.REFUSED, _BAD)


@rule("PING, PONG", disturbs=True)
def pings(c: ProbeClient) -> None:
    """PONG says which blocks run: none, when all are answered."""
    answer = c.ask(c.message(MessageType.PING), MessageType.PONG)
    expect(not (running := Pong.decode(answer.body).running), "none", running)


@rule("DETACH, DETACHED")
def detached(c: ProbeClient) -> None:
    """DETACH frees the envs: the session has none any more, and gets none."""
    epoch, c.epoch = c.attach().epoch, 0
    for _ in range(2):
        c.ask(c.message(MessageType.DETACH), MessageType.DETACHED)
    c.expect_error(replace(c.next_step(), epoch=epoch), ErrorCode.LEASE_LOST)
    late = replace(c.attached, attempt=c.attached.attempt + 1)
    c.ask(late, MessageType.DETACHED)


@rule("Rules of the server")
def silence(c: ProbeClient) -> None:
    """3: A session that is silent loses its lease."""
    seconds = c.subject.welcome.lease_seconds
    if seconds > _MOST_SILENCE:
        raise SkipRule(f"its lease_seconds are {seconds:g}, above {_MOST_SILENCE:g}")
    c.attach().receive(seconds + 1.0)
    c.expect_error(c.message(MessageType.PING), ErrorCode.LEASE_LOST)
    c.epoch = 0
