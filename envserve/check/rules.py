"""Check that a server follows the protocol, with one function per rule.

The docstring of each function states its rule, as an instruction to the server.
`envserve check` prints it as the title of the rule.
"""

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
from envserve.lane import Call, make_blocks
from envserve.spaces import codec
from envserve.wire.bodies import CallBody, Pong
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.handshake import Hello
from envserve.wire.message import Message, encode

_MAX_STEPS: Final = 1000
_MAX_LEASE_SECONDS: Final = 5.0
_MAX_SENT_BYTES: Final = 1 << 28
_BAD: Final = ErrorCode.BAD_MESSAGE
_Check = Callable[[ProbeClient], object]


class CheckResult(NamedTuple):
    """The result of checking one rule."""

    name: str
    """Name of the function that checks the rule."""
    section: str
    """Section of the protocol that contains the rule."""
    title: str
    outcome: str = "ok"
    """"ok", "fail" or "skipped"."""
    why: str = ""
    """Reason for a failed or skipped rule."""


#: Maps each rule to its check, and to whether the check's client holds a lease. The
#: keys are the results that a server gets if it follows the rules.
RULES: Final[dict[CheckResult, tuple[_Check, bool]]] = {}


def rule(section: str, *, with_lease: bool = False) -> Callable[[_Check], _Check]:
    """Return a decorator that adds a check to `RULES`.

    Args:
      section: Heading of the section of the protocol that contains the rule.
      with_lease: Whether the check receives a client that holds a lease. The check then
        fails if it affects the rows of the lease.
    """

    def register(function: _Check) -> _Check:
        title = str(function.__doc__).rstrip(".")
        RULES[CheckResult(function.__name__, section, title)] = function, with_lease
        return function

    return register


def check(subject: ServerUnderTest) -> Iterator[CheckResult]:
    """Check all rules and yield one result per rule; release all leases.

    Raises:
      RemoteProtocolError: The server does not reply to HELLO with WELCOME.
    """
    for result, (function, with_lease) in RULES.items():
        client = subject.client()
        client.hello()
        try:
            if with_lease:
                client.attach_and_step()
            function(client)
            if with_lease:
                client.expect_unaffected()
            subject.close_clients()
        except SkipRule as error:
            result = result._replace(outcome="skipped", why=str(error))
        except EnvserveError as error:
            result = result._replace(outcome="fail", why=str(error))
        with contextlib.suppress(EnvserveError):
            subject.close_clients()
        yield result


# HELLO, message types and encodings.


@rule("WELCOME")
def welcome(c: ProbeClient) -> None:
    """Reply to HELLO with a consistent WELCOME."""
    body = c.subject.welcome
    expect(body.min_version <= 2 <= body.max_version, "version 2", body)
    expect(body.free_envs <= body.total_envs, "free_envs <= total_envs", body)
    expect(len(body.env_names) <= body.num_names, "at most num_names names", body)
    boot = c.hello(request=1 << 40, attempt=7).boot
    expect(boot == c.subject.boot, f"boot id {c.subject.boot} again", boot)


@rule("WELCOME")
def versions(c: ProbeClient) -> None:
    """Reply to other versions with VERSION_MISMATCH, in the version of the HELLO."""
    body = Hello(min_version=200, max_version=201).encode()
    for version in (2, 200):
        hello = c.message(MessageType.HELLO, body, version=version)
        c.expect_error(hello, ErrorCode.VERSION_MISMATCH)


@rule("Types", with_lease=True)
def types(c: ProbeClient) -> None:
    """Reply to unknown types with UNSUPPORTED; ignore types that only servers send."""
    c.expect_error(c.message(127), ErrorCode.UNSUPPORTED)
    for frames in ([b""], [b"x" * 99], [b"", b"", b""], [b"ENVS"]):
        c.link.send(frames)
    c.send(c.message(MessageType.WELCOME), c.message(255))
    expect(not (replies := c.receive_all()), "no reply", [*map(describe, replies)])


@rule("Frame 0", with_lease=True)
def lengths(c: ProbeClient) -> None:
    """Reject messages with wrong or excessive lengths in frame 0."""
    ping = c.message(MessageType.PING)
    c.expect_error(ping, _BAD, sent=[bytes(encode(ping)[0]) + b"x"])
    c.expect_error(c.message(MessageType.ATTACH, bytes(5000)), _BAD)
    c.expect_error(c.message(MessageType.STEP, entries=((0, 1),) * 5000), _BAD)


@rule("Limits", with_lease=True)
def long_messages(c: ProbeClient) -> None:
    """Protect other clients from messages with long frames or too many frames."""
    limit = c.subject.welcome.max_message_bytes
    if limit > _MAX_SENT_BYTES:
        raise SkipRule(
            f"the server's max_message_bytes is {limit:,}; this check requires at most "
            f"{_MAX_SENT_BYTES:,}"
        )
    ping = encode(c.message(MessageType.PING))
    for frames in ([bytes(limit + 4096)], ping * 9):
        link = c.subject.open_link()
        link.send(frames)
        link.receive(0.1)
        link.close()


# Leases.


def _attach(c: ProbeClient, **changes: Any) -> Message:
    fields = {"env_name": c.subject.env_name, "num_envs": 2, "seed": 3}
    return c.message(MessageType.ATTACH, codec.encode({**fields, **changes}), epoch=0)


@rule("Msgpack")
def encodings(c: ProbeClient) -> None:
    """Reject invalid or too deeply nested msgpack; ignore unknown fields."""
    deep = b"\x91" * 40 + b"\xc0"
    for body in (b"", b"\xc1", b"\x81", deep, b"\xdd\xff\xff\xff\xff", b"\xd4\5\0"):
        c.expect_error(c.message(MessageType.ATTACH, body), _BAD)
    c.grant(_attach(c, of_a_later_version=[1, {"a": None}]))
    c.detach()


@rule("ATTACH")
def bad_attach(c: ProbeClient) -> None:
    """Reject an invalid or unsatisfiable ATTACH with the matching error code."""
    for changes in ({"num_envs": 0}, {"seed": -1}, {"autoreset": "?"}, {"seed": "7"}):
        c.expect_error(_attach(c, **changes), _BAD)
    others = ErrorCode.UNKNOWN_ENV, ErrorCode.ENVS_BUSY, ErrorCode.REFUSED
    c.expect_error(_attach(c, env_name="no-such-env"), *others[::2])
    c.expect_error(_attach(c, num_envs=1 << 16), *others[1:])


@rule("GRANTED")
def granted(c: ProbeClient) -> None:
    """List valid spaces in GRANTED, and blocks that divide the rows equally."""
    try:
        blocks = c.attach().blocks
    except SkipRule as error:
        raise RemoteProtocolError(f"expected GRANTED; got {error}") from None
    per_split = sum(block.split == 0 for block in blocks)
    equal, actual = (
        [(block.start, block.split) for block in each]
        for each in (make_blocks(4, 1, 2, per_split), blocks)
    )
    expect(actual == equal, f"blocks with [start, split] {equal}", actual)


@rule("Rules of the server", with_lease=True)
def attached_again(c: ProbeClient) -> None:
    """Rule 2: Reply identically to a copy of ATTACH; reject a different ATTACH."""
    copy = replace(c.attached, attempt=c.attached.attempt + 1)
    reply = c.request(copy, MessageType.GRANTED, MessageType.BUILDING)
    is_same = reply.body == c.granted or reply.type is MessageType.BUILDING
    expect(is_same, "the same GRANTED again", "a different one")
    c.expect_error(_attach(c, num_envs=1), _BAD)


@rule("Rules of the server", with_lease=True)
def fenced(c: ProbeClient) -> None:
    """Rule 1: Reject a wrong boot id or epoch (FENCED), or session (LEASE_LOST)."""
    for message in (c.message(MessageType.PING), c.next_step()):
        c.expect_error(replace(message, boot=c.subject.boot ^ 2), ErrorCode.FENCED)
        c.expect_error(replace(message, epoch=c.epoch + 1), ErrorCode.FENCED)
    other = c.subject.client()
    other.expect_error(other.message(MessageType.PING), ErrorCode.LEASE_LOST)


@rule("Rules of the server", with_lease=True)
def separate_sessions(c: ProbeClient) -> None:
    """Rule 2: Isolate sessions from each other."""
    other = c.subject.client().attach(seed=12)
    for raw in c.subject.reference[c.num_steps : -3]:
        other.step()
        expect(c.step().raw == raw, "rows of the session's seed", "different rows")


# Operations are executed at most once.


@rule("Rules of the server", with_lease=True)
def copies(c: ProbeClient) -> None:
    """Rule 4: Reply to each copy of a finished request once, with the stored result."""
    c.link.receive(1.1)
    result = c.read(c.request(replace(c.last, attempt=1)))
    expect(result.raw == c.last_result.raw, "the same rows again", "different rows")
    c.link.receive(1.1)  # wait, because the server resends rows at most once a second
    c.send(replace(c.last, attempt=1))
    replies = [*map(describe, c.receive_all())]
    expect(not replies, "one reply per attempt", replies)


@rule("Rules of the server", with_lease=True)
def copy_of_running(c: ProbeClient) -> None:
    """Rule 4: Reply to a copy of a request in progress with that request's result."""
    step = c.next_step()
    duplicates = [replace(step, attempt=number) for number in (1, 1, 2)]
    results = [c.execute(step, *duplicates), *map(c.read, c.receive_all())]
    expect(
        len({result.raw for result in results}) == 1, "equal replies", "different ones"
    )
    expect(len(results) <= 3, "at most one reply per attempt", len(results))


@rule("Transport", with_lease=True)
def second_connection(c: ProbeClient) -> None:
    """Let a client change its connection; send replies to the latest one."""
    first, c.link = c.link, c.subject.open_link()
    result = c.read(c.request(replace(c.last, attempt=1)))
    expect(result.raw == c.last_result.raw, "the same rows again", "different rows")
    first.close()


@rule("Rules of the server", with_lease=True)
def seqs(c: ProbeClient) -> None:
    """Rule 4: Reply to a seq that is too high with GAP; ignore an old seq."""
    skipping, current, outdated = (
        replace(c.next_step(), entries=tuple((b, s + by) for b, s in enumerate(c.seqs)))
        for by in (2, 0, -1)
    )
    c.expect_error(skipping, ErrorCode.GAP)
    c.send(current, outdated)
    expect(not (replies := c.receive_all()), "no reply", [*map(describe, replies)])


# Steps and resets.


@rule("STEP", with_lease=True)
def bad_steps(c: ProbeClient) -> None:
    """Reject a STEP with a wrong size, no blocks, or unknown or repeated blocks."""
    (block, seq), *others = c.next_step().entries
    for entries in ((), ((4000, 1), *others), ((block, seq), (block, seq))):
        c.expect_error(replace(c.next_step(), entries=entries), _BAD)
    # Actions without values have an empty body, which cannot be shorter.
    for body in (c.last.body + b"\0", c.last.body[:-1]):
        if body != c.last.body:
            c.expect_error(replace(c.next_step(), body=body), _BAD)


@rule("STEP", with_lease=True)
def bad_actions(c: ProbeClient) -> None:
    """Reject actions outside the action space."""
    leaf = c.spec.action_leaves[0]
    is_float, maximum = leaf.dtype.kind == "f", np.max(leaf.limits[1], initial=1)
    allows_all = leaf.is_encoded or leaf.dtype.kind == "b" or not leaf.nbytes
    if allows_all or (not is_float and maximum == np.iinfo(leaf.dtype).max):
        raise SkipRule("the action space allows every value that can be encoded")
    c.expect_error(
        c.next_step(np.nan if is_float else maximum + 1), ErrorCode.INVALID_ACTION
    )


@rule("ATTACH")
def equal_seeds(c: ProbeClient) -> None:
    """Produce equal episodes for equal seeds."""
    try:
        _ = c.subject.reference
    except SkipRule as error:
        text = f"expected equal results for equal seeds; {error}"
        raise RemoteProtocolError(text) from None


def _seeded(c: ProbeClient, seeds: Any) -> dict[int, Any]:
    return {b.index: (None, tuple(seeds[b.start : b.stop])) for b in c.blocks}


def _at(leaves: Any, row: int) -> list[bytes]:
    return [leaf[row].tobytes() for leaf in leaves]


@rule("ATTACH")
def first_seeds(c: ProbeClient) -> None:
    """Derive the seed of the first reset from root seed, env index and incarnation."""
    _ = c.subject.reference
    c.attach(seed=5, first_env_index=7, first_incarnation=3)
    seeds = [env_seed(5, 7 + row, 3) for row in range(4)]
    other = c.subject.client().attach()
    is_same = other.reset(_seeded(other, seeds)).raw == c.first.raw
    expect(is_same, f"the observations of seeds {seeds}", "different ones")


@rule("RESET")
def given_seeds(c: ProbeClient) -> None:
    """Use the seeds of a RESET; do not change rows that the RESET does not list."""
    _ = c.subject.reference
    first = c.attach().reset(_seeded(c, range(4)))
    stepped = c.step()
    reset = c.reset({0: ((0,), (0,))})
    for row, old in ((0, first), (1, stepped)):
        is_same = _at(reset.rows.observation, row) == _at(old.rows.observation, row)
        expected = "row 0 reset with seed 0, and row 1 unchanged"
        expect(is_same, expected, f"another observation of row {row}")


# Ends of episodes.


def _play_until_end(c: ProbeClient, autoreset: str) -> tuple[int, list[bytes]]:
    """Step until an episode ends; check that its row shows the final observation.

    The expected observations come from a second lease with autoreset "same_step". When
    an episode ends in that lease, the results contain both the final observation of the
    episode and the first observation of the next one.

    Returns:
      The row, and the expected first observation of its next episode.
    """
    _ = c.subject.reference
    for client, mode in ((c.subject.client(), "same_step"), (c, autoreset)):
        result = client.attach(autoreset=mode).first
        while not (ended := result.rows.terminated | result.rows.truncated).any():
            if client.num_steps == _MAX_STEPS:
                raise SkipRule(f"no episode has ended within {_MAX_STEPS:,} steps")
            result = client.step()
        row, rows = int(ended.argmax()), result.rows
        if client is not c:
            final, first = _at(rows.final_observation, row), _at(rows.observation, row)
    for leaves in (rows.observation, rows.final_observation):
        expect(_at(leaves, row) == final, "the final observation", "another")
    return row, first


@rule("ATTACH")
def next_step(c: ProbeClient) -> None:
    """Autoreset next_step: show the final observation; reset in the next STEP."""
    row, first = _play_until_end(c, "next_step")
    rows = c.step().rows
    expect(_at(rows.observation, row) == first, "the first observation", "another")
    values = rows.reward[row], rows.terminated[row], rows.truncated[row]
    expect(not any(values), "reward 0, not terminated, not truncated", values)


@rule("ATTACH")
def disabled(c: ProbeClient) -> None:
    """Autoreset disabled: show the final observation until a RESET."""
    row, first = _play_until_end(c, "disabled")
    (block,) = (b.index for b in c.blocks if b.start <= row < b.stop)
    rows = c.reset({block: ((row,), None)}).rows
    expect(_at(rows.observation, row) == first, "the first observation", "another")


# Other requests.


@rule("CALL", with_lease=True)
def calls(c: ProbeClient) -> None:
    """Reject a CALL of an attribute that the server does not expose."""
    hidden = CallBody.from_calls([Call(0, (0,), "get", "_hidden", b"\x92\x90\x80")])
    call = c.operation(MessageType.CALL, [0], hidden.encode())
    c.expect_error(call, ErrorCode.REFUSED, _BAD)


@rule("PING, PONG", with_lease=True)
def pings(c: ProbeClient) -> None:
    """List the running operations in PONG, and none once all are answered."""
    reply = c.request(c.message(MessageType.PING), MessageType.PONG)
    running = Pong.decode(reply.body).running
    expect(not running, "no running operations", running)


@rule("PING, PONG", with_lease=True)
def running(c: ProbeClient) -> None:
    """List at least one block of each unanswered request in PONG."""
    c.execute(c.next_step(), c.message(MessageType.PING))


@rule("DETACH, DETACHED")
def detached(c: ProbeClient) -> None:
    """Release the lease on DETACH; do not let the session attach again."""
    epoch, c.epoch = c.attach().epoch, 0
    for _ in range(2):
        c.request(c.message(MessageType.DETACH), MessageType.DETACHED)
    c.expect_error(replace(c.next_step(), epoch=epoch), ErrorCode.LEASE_LOST)
    late = replace(c.attached, attempt=c.attached.attempt + 1)
    c.request(late, MessageType.DETACHED)


@rule("Rules of the server")
def silence(c: ProbeClient) -> None:
    """Rule 3: Let the lease of a silent session expire."""
    seconds, limit = c.subject.welcome.lease_seconds, _MAX_LEASE_SECONDS
    if seconds > limit:
        raise SkipRule(
            f"the server's lease_seconds is {seconds:g}; this check requires at most "
            f"{limit:g}"
        )
    c.attach().receive(seconds + 1.0)
    c.expect_error(c.message(MessageType.PING), ErrorCode.LEASE_LOST)
    c.epoch = 0
