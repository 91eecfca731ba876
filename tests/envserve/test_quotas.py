"""User quotas: excess requests are rejected, and other users are not affected."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from envserve.host_resources import num_cores
from envserve.keys.grant import Grant
from envserve.session.server.decisions import SessionId
from envserve.session.server.server_protocol import ServerProtocol
from envserve.settings import HostSettings
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello, Welcome
from envserve.wire.message import Message, decode, encode
from tests.envserve.session_fakes import FakeServer, make_attach

NAMES = ("ALE/Pong-v5", "Fake-v0", "Other-v0")


class KeyServer(FakeServer):
    """A server with keys; by default, each message has a new session number."""

    def __init__(self, *grants: Grant, **policy: Any) -> None:
        settings = {"num_workers": 2, "envs_per_worker": 8, "max_processes": 8}
        super().__init__(HostSettings(**{**settings, **policy}))
        self.grants = {grant.name: grant for grant in grants}
        self.numbers: Iterator[int] = count(1)

    def __post_init__(self) -> None:
        self.protocol = ServerProtocol(
            self.policy, NAMES, self.boot, grant_of=lambda name: self.grants.get(name)
        )

    def send(
        self, user: str, kind: MessageType, now: float = 0.0, **fields: Any
    ) -> Message:
        numbers = {"session": next(self.numbers), "boot": self.boot, **fields}
        self.receive((0, b"r", user), encode(Message(type=kind, **numbers)), now)
        return [decode(frames) for frames in self.take_replies()][-1]

    def attach(
        self, user: str = "ann", now: float = 0.0, session: int = 0, **arguments: Any
    ) -> Message:
        body = make_attach(**{"num_envs": 1, **arguments}).encode()
        number = {"session": session} if session else {}
        return self.send(user, MessageType.ATTACH, now, body=body, **number)

    def reject(
        self, user: str = "ann", now: float = 0.0, **arguments: Any
    ) -> ErrorBody:
        """Send an ATTACH that must be rejected; return its error."""
        before = set(self.pools)
        reply = self.attach(user, now, **arguments)
        assert reply.type is MessageType.ERROR
        assert set(self.pools) == before
        return ErrorBody.decode(reply.body)

    def num_audits(self, event: str, user: str) -> int:
        """Return the number of audited events of this kind for a user."""
        return sum(audit[:2] == (event, user) for audit in self.audits)

    def detach(self, session: SessionId) -> None:
        user, number = session
        reply = self.send(user, MessageType.DETACH, session=number)
        assert reply.type is MessageType.DETACHED


def grant(name: str = "ann", **options: Any) -> Grant:
    return Grant(name=name, public=bytes(32), **options)


BUILDING, GRANTED = MessageType.BUILDING, MessageType.GRANTED
FEW = {"num_workers": 1, "max_processes": 100}


@pytest.mark.parametrize(
    ("options", "policy", "unit", "total", "remedy"),
    [
        ({"max_envs": 3}, {}, "envs", 16, "max-envs= of ann in the server's clients "),
        ({"max_leases": 3}, {}, "leases", 16, "max-leases= of ann in the server's "),
        ({"max_processes": 3}, {}, "processes", 8, "max-processes= of ann in the "),
        ({}, {"max_processes": 4}, "processes", 4, "--max-processes of `envserve st"),
        (
            *({"max_processes": 9}, {"max_processes": 4}, "processes", 4),
            "--max-processes of `envserve start`",
        ),
    ],
)
def test_a_lease_beyond_the_quota_is_busy_until_another_one_ends(
    options: dict[str, Any], policy: dict[str, Any], unit: str, total: int, remedy: str
) -> None:
    server = KeyServer(grant(**options), grant("bob"), **policy)
    for _ in range(3):
        server.attach()
    assert len(server.pools) == 3
    body = server.reject()
    assert body.code is ErrorCode.ENVS_BUSY
    assert body.text.startswith(
        f"ann uses 3 of its 3 {unit} and requested 1 more; other users use 0 of {total}"
    )
    assert f"; the operator can raise {remedy}" in body.text
    assert server.num_audits("over quota", "ann") == 1
    server.attach("bob")
    assert "bob" in {user for user, _ in server.pools}
    server.detach(("ann", 1))
    server.attach()
    assert len(server.pools) == 4
    assert server.num_audits("attached", "ann") == 4
    assert server.num_audits("ended", "ann") == 1


def test_a_request_larger_than_the_quota_is_rejected() -> None:
    server = KeyServer(grant(max_envs=3), grant("bob"))
    server.attach("bob", num_envs=13)  # leaves 3 of 16 envs
    body = server.reject(num_envs=4)
    assert body.code is ErrorCode.REFUSED
    assert body.text.startswith("ann may use 3 envs, but requested 4; ")
    assert body.text.endswith("raise max-envs= of ann in the server's clients file")
    body = server.reject(num_envs=2, spare_envs=True)
    assert "requested 4" in body.text
    server.attach(num_envs=3)
    assert len(server.pools) == 2


def test_a_lease_has_at_most_as_many_workers_as_its_key_allows_processes() -> None:
    server = KeyServer(grant(max_processes=1), num_workers=2)
    server.attach(num_envs=4)
    server.attach("local", num_envs=4)
    workers = [pool.config.num_workers for pool in server.pools.values()]
    assert workers == [1, 2]


def test_processes_of_all_users_count_towards_the_limit_of_the_server() -> None:
    server = KeyServer(grant(), grant("bob"), num_workers=3, max_processes=4)
    server.attach("ann", num_envs=3)
    body = server.reject("bob", num_envs=2)
    assert body.code is ErrorCode.ENVS_BUSY
    assert body.text.startswith("2 processes requested, 1 of 4 free; ")
    server.attach("bob", num_envs=2, num_splits=2)  # one worker per split
    assert len(server.pools) == 2


def test_a_key_leaves_a_quarter_of_the_processes_to_others() -> None:
    server = KeyServer(grant(), num_workers=1, envs_per_worker=100, max_processes=8)
    for _ in range(6):
        server.attach()
    text = "ann uses 6 of its 6 processes and requested 1 more; other users use 0 of 8"
    assert server.reject().text.startswith(text)
    for _ in range(2):
        server.attach("local")
    assert len(server.pools) == 8


def test_a_key_may_use_all_workers_with_one_lease() -> None:
    server = KeyServer(grant(), num_workers=4, max_processes=4)
    server.attach(num_envs=4)
    assert server.pools["ann", 1].config.num_workers == 4


def test_by_default_a_key_may_use_three_leases_with_all_workers() -> None:
    many = 2 * num_cores()
    server = KeyServer(grant(), num_workers=many, max_processes=None)
    for _ in range(3):
        server.attach(num_envs=many)
    used = f"ann uses {3 * many} of its {3 * many} processes and requested 1 more"
    assert server.reject().text.startswith(used)


def test_users_without_a_key_may_use_all_processes() -> None:
    server = KeyServer(num_workers=1, envs_per_worker=100, max_processes=8)
    for _ in range(8):
        server.attach("")
    text = "the user without a key uses 8 of its 8 processes and requested 1 more; "
    assert server.reject("").text.startswith(text)


def test_a_key_may_attach_twice_a_second_and_eight_times_at_once() -> None:
    server = KeyServer(grant(), grant("bob"), **FEW, envs_per_worker=100)
    for _ in range(8):
        server.attach()
    server.attach(session=100)
    assert server.num_audits("over quota", "ann") == 1
    for user in ("bob", "local", ""):
        server.attach(user)
    assert len(server.pools) == 11
    server.attach(now=0.5)
    server.attach(now=0.75)
    server.attach(now=1.0)
    assert len(server.pools) == 13
    for _ in range(9):
        server.attach(now=100.0)
    assert len(server.pools) == 21


def test_a_rate_limited_attach_succeeds_when_a_later_copy_is_within_the_rate() -> None:
    """Without this, a trainer with more than eight lanes could not start."""
    server = KeyServer(grant(), **FEW, envs_per_worker=100)
    for number in range(100, 112):
        assert server.attach(session=number).type is BUILDING
    assert len(server.pools) == 8
    for now in (0.5, 1.0, 1.5, 2.0):
        for number in range(108, 112):
            assert server.attach(session=number, now=now).type in (BUILDING, GRANTED)
        assert len(server.pools) == 8 + 2 * now


def test_users_without_a_key_attach_without_a_rate_limit() -> None:
    server = KeyServer(**FEW, envs_per_worker=100)
    for _ in range(30):
        server.attach("local")
    assert len(server.pools) == 30


@pytest.mark.parametrize("event", ["built", "detached", "broken"])
def test_four_leases_of_a_user_are_built_concurrently(event: str) -> None:
    server = KeyServer(grant(), grant("bob"), **FEW, envs_per_worker=100)
    server.builds_at_once = False
    for _ in range(8):
        assert server.attach().type is BUILDING
    assert list(server.pools) == [("ann", number) for number in range(1, 5)]
    server.attach("bob")
    assert ("bob", 9) in server.pools
    server.detach(("ann", 5))  # while it is queued
    assert len(server.pools) == 5
    if event == "built":
        server.build(("ann", 2), 1.0)
    elif event == "detached":
        server.detach(("ann", 2))
    else:
        server.pools.pop(("ann", 2)).close()
        server.carry_out(
            server.protocol.pool_broken(("ann", 2), LookupError("x")),  # type: ignore[arg-type]
            1.0,
        )
    assert ("ann", 6) in server.pools
    assert ("ann", 7) not in server.pools


def test_all_leases_of_a_user_share_its_row_memory() -> None:
    """Leases are built one after the other, because only then are row sizes known."""
    server = KeyServer(grant(max_row_mib=3), grant("bob"), **FEW, envs_per_worker=1000)
    server.builds_at_once = False
    for number in range(100, 103):
        server.attach(session=number, num_envs=100)
    server.attach("bob", session=103)
    assert set(server.pools) == {("ann", 100), ("bob", 103)}
    assert server.pools["ann", 100].config.max_row_mib == 3
    assert server.pools["bob", 103].config.max_row_mib is None
    server.build(("bob", 103), 0.0)
    server.build(("ann", 100), 0.0)  # rounded up to 1 MiB
    assert server.pools["ann", 101].config.max_row_mib == 2
    server.detach(("ann", 100))
    server.build(("ann", 101), 0.0)
    assert server.pools["ann", 102].config.max_row_mib == 2


def test_the_row_memory_limit_of_the_host_applies_to_all_keys() -> None:
    server = KeyServer(grant(max_row_mib=3), grant("bob"), max_row_mib=2, **FEW)
    for user in ("ann", "bob", "local"):
        server.attach(user)
    assert {pool.config.max_row_mib for pool in server.pools.values()} == {2}


def test_a_key_may_use_envs_that_match_its_patterns() -> None:
    server = KeyServer(grant(envs=("ALE/*", "Other-v0")))
    body = server.reject(env_name="Fake-v0")
    assert body.code is ErrorCode.REFUSED
    assert body.text == (
        "ann may use ALE/* and Other-v0, but requested Fake-v0; the operator can add "
        "it to the clients file"
    )
    assert server.num_audits("refused", "ann") == 1
    for name in ("ALE/Pong-v5", "Other-v0"):
        server.attach(env_name=name)
    assert len(server.pools) == 2
    body = server.reject(env_name="ALE/Tetris-v5")
    assert body.code is ErrorCode.UNKNOWN_ENV


def welcome(server: KeyServer, user: str) -> Welcome:
    body = Hello().encode()
    reply = server.send(user, MessageType.HELLO, boot=0, body=body)
    return Welcome.decode(reply.body)


def test_a_welcome_lists_the_envs_and_limits_of_the_user() -> None:
    server = KeyServer(grant(envs=("ALE/*",), max_envs=3))
    server.attach(env_name="ALE/Pong-v5", num_envs=2)
    server.attach("local", num_envs=4)
    greeting = welcome(server, "ann")
    assert (greeting.env_names, greeting.num_names) == (("ALE/Pong-v5",), 1)
    assert (greeting.total_envs, greeting.free_envs) == (3, 1)
    server.grants["ann"] = grant(max_envs=1)  # fewer than are leased
    assert welcome(server, "ann").free_envs == 0
    greeting = welcome(server, "local")
    assert (greeting.env_names, greeting.num_names) == (NAMES, 3)
    assert (greeting.total_envs, greeting.free_envs) == (16, 10)


def test_no_envs_are_free_if_no_process_is_left() -> None:
    server = KeyServer(grant(max_processes=1), max_processes=2)
    server.attach(env_name="ALE/Pong-v5", num_envs=2)
    assert welcome(server, "ann").free_envs == 0
    assert welcome(server, "local").free_envs == 14
    server.attach("local", num_envs=1)
    assert welcome(server, "local").free_envs == 0


def test_env_arguments_must_be_allowed_by_the_host_and_the_key() -> None:
    allowed = frozenset({"gravity", "mode:a|b"})
    key = grant(allowed_kwargs=("gravity:int[0,10]", "mode:a", "file:any"))
    server = KeyServer(key, allowed_kwargs=allowed)
    for kwargs in ({"gravity": 11}, {"mode": "b"}, {"file": "x"}, {"gravity": "1"}):
        body = server.reject(env_kwargs=kwargs)
        assert body.code is ErrorCode.REFUSED
        assert f"env argument '{next(iter(kwargs))}'" in body.text
    server.attach(env_kwargs={"gravity": 10, "mode": "a"})
    server.attach("local", env_kwargs={"gravity": 11, "mode": "b"})
    assert len(server.pools) == 2


def test_a_lease_exposes_the_attributes_that_its_key_may_use() -> None:
    server = KeyServer(
        grant(exposed=("get:level",)), exposed=frozenset({"level", "set:level"})
    )
    for number, user in enumerate(("ann", "local"), 1):
        server.attach(user)
        record = server.protocol.leases[user, number]
        assert record.settings.exposed == (
            {"get:level"} if user == "ann" else {"level", "set:level"}
        )


def test_a_key_that_is_no_longer_valid_is_rejected() -> None:
    server = KeyServer(grant())
    server.attach()
    server.grants.clear()
    body = server.reject()
    assert body.code is ErrorCode.REFUSED
    assert body.text.startswith("the key of ann is no longer valid, because ")
    for kind in (MessageType.HELLO, MessageType.STATUS):
        reply = server.send("ann", kind, boot=0, body=Hello().encode())
        assert ErrorBody.decode(reply.body).code is ErrorCode.REFUSED


def test_session_numbers_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A reader of the log must not be able to detach another user's session."""
    number = 0xC0FFEE0123456789
    server = KeyServer(grant())
    with caplog.at_level("DEBUG"):
        body = make_attach(num_envs=1).encode()
        server.send("ann", MessageType.ATTACH, session=number, body=body)
        assert server.protocol.leases.name_of(("ann", number)) == "lease 1 of ann"
        server.detach(("ann", number))
    assert "lease 1 of ann: 1 Fake-v0, ended (detached)" in caplog.text
    for text in (f"{number:x}", str(number)):
        assert text not in caplog.text
    assert server.protocol.leases.name_of(("ann", number)) == "a lease that has ended"


def test_a_client_whose_key_was_removed_is_notified_once() -> None:
    server = KeyServer(grant(), grant("bob"))
    for user in ("ann", "bob"):
        server.attach(user)
    leases = server.protocol.leases
    first, second = leases.close_users({"ann"}), leases.close_users({"ann"})
    assert [type(decision).__name__ for decision in first] == ["Reply", "EndPool"]
    assert not second
    assert server.protocol.refusals == {"LEASE_LOST": 1}
