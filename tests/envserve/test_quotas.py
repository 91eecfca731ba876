"""What users may have: one more than that is refused, and others are not touched."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from envserve.keys.grant import Grant
from envserve.session.server.decisions import SessionId
from envserve.session.server.server_session import ServerSession
from envserve.settings import HostSettings
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.handshake import ErrorBody, Hello, Welcome
from envserve.wire.message import Message, decode, encode
from tests.envserve.session_fakes import FakeServer, make_attach

NAMES = ("ALE/Pong-v5", "Fake-v0", "Other-v0")


class KeyServer(FakeServer):
    """A server whose users have keys, `grants`; each says one thing at a time."""

    def __init__(self, *grants: Grant, **policy: Any) -> None:
        settings = {"num_workers": 2, "envs_per_worker": 8, "max_processes": 8}
        super().__init__(HostSettings(**{**settings, **policy}))
        self.grants = {grant.name: grant for grant in grants}
        self.numbers: Iterator[int] = count(1)

    def __post_init__(self) -> None:
        self.session = ServerSession(
            self.policy, NAMES, self.boot, grant_of=lambda name: self.grants.get(name)
        )

    def say(
        self, user: str, kind: MessageType, now: float = 0.0, **fields: Any
    ) -> Message:
        numbers = {"session": next(self.numbers), "boot": self.boot, **fields}
        self.receive((0, b"r", user), encode(Message(type=kind, **numbers)), now)
        last = [decode(frames) for frames in self.take_replies()][-1]
        return last

    def attach(
        self, user: str = "ann", now: float = 0.0, session: int = 0, **asked: Any
    ) -> Message:
        body = make_attach(**{"num_envs": 1, **asked}).encode()
        number = {"session": session} if session else {}
        return self.say(user, MessageType.ATTACH, now, body=body, **number)

    def refuse(self, user: str = "ann", now: float = 0.0, **asked: Any) -> ErrorBody:
        """Asks for envs in vain."""
        before = set(self.pools)
        answer = self.attach(user, now, **asked)
        assert answer.type is MessageType.ERROR
        assert set(self.pools) == before
        return ErrorBody.decode(answer.body)

    def num_audits(self, event: str, user: str) -> int:
        """Return how many events of a kind were audited for a user."""
        return sum(audit[:2] == (event, user) for audit in self.audits)

    def detach(self, session: SessionId) -> None:
        user, number = session
        answer = self.say(user, MessageType.DETACH, session=number)
        assert answer.type is MessageType.DETACHED


def grant(name: str = "ann", **options: Any) -> Grant:
    return Grant(name=name, public=bytes(32), **options)


GIVEN, GRANTED = MessageType.BUILDING, MessageType.GRANTED
FEW = {"num_workers": 1, "max_processes": 100}


@pytest.mark.parametrize(
    ("options", "policy", "text"),
    [
        ({"max_envs": 3}, {}, "ann uses 3 of its 3 envs; others use 0 of 16"),
        ({"max_leases": 3}, {}, "ann uses 3 of its 3 leases; others use 0 of 16"),
        ({"max_processes": 3}, {}, "ann uses 3 of its 3 processes; others use 0 of 8"),
        (
            *({}, {"max_processes": 4}),
            "ann uses 3 of its 3 processes; others use 0 of 4",
        ),
        (
            *({"max_processes": 9}, {"max_processes": 4}),
            "ann uses 3 of its 3 processes; others use 0 of 4",
        ),
    ],
)
def test_one_more_than_a_user_may_have_is_busy_until_it_gives_one_back(
    options: dict[str, Any], policy: dict[str, Any], text: str
) -> None:
    server = KeyServer(grant(**options), grant("bob"), **policy)
    for _ in range(3):
        server.attach()
    assert len(server.pools) == 3
    body = server.refuse()
    assert (body.code, body.text) == (ErrorCode.ENVS_BUSY, text)
    assert server.num_audits("over quota", "ann") == 1
    server.attach("bob")
    assert "bob" in {user for user, _ in server.pools}
    server.detach(("ann", 1))
    server.attach()
    assert len(server.pools) == 4
    assert server.num_audits("attached", "ann") == 4
    assert server.num_audits("ended", "ann") == 1


def test_more_than_a_user_may_ever_have_is_refused_for_good() -> None:
    server = KeyServer(grant(max_envs=3))
    body = server.refuse(num_envs=4)
    assert body.code is ErrorCode.REFUSED
    assert body.text.startswith("ann may use 3 envs; requested 4; ")
    body = server.refuse(num_envs=2, spare_envs=True)
    assert "requested 4" in body.text
    server.attach(num_envs=3)
    assert server.pools


def test_a_lease_has_no_more_workers_than_its_key_may_have_processes() -> None:
    server = KeyServer(grant(max_processes=1), num_workers=2)
    server.attach(num_envs=4)
    server.attach("local", num_envs=4)
    workers = [pool.config.num_workers for pool in server.pools.values()]
    assert workers == [1, 2]


def test_processes_of_all_users_together_are_counted() -> None:
    server = KeyServer(grant(), grant("bob"), num_workers=3, max_processes=4)
    server.attach("ann", num_envs=3)
    body = server.refuse("bob", num_envs=2)
    assert body.code is ErrorCode.ENVS_BUSY
    assert body.text.startswith("2 processes requested, 1 of 4 free; ")
    server.attach("bob", num_envs=2, num_splits=2)  # which is stepped by one
    assert len(server.pools) == 2


def test_a_key_leaves_a_quarter_of_the_processes_to_others() -> None:
    server = KeyServer(grant(), num_workers=1, envs_per_worker=100, max_processes=8)
    for _ in range(6):
        server.attach()
    text = "ann uses 6 of its 6 processes; others use 0 of 8"
    assert server.refuse().text == text
    for _ in range(2):
        server.attach("local")
    assert len(server.pools) == 8


def test_users_without_a_key_may_have_all_processes() -> None:
    server = KeyServer(num_workers=1, envs_per_worker=100, max_processes=8)
    for _ in range(8):
        server.attach("")
    text = "the user without a key uses 8 of its 8 processes; others use 0 of 8"
    assert server.refuse("").text == text


def test_a_key_attaches_twice_a_second_and_eight_times_at_once() -> None:
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


def test_a_lease_that_is_too_early_begins_when_a_copy_of_its_attach_is_not() -> None:
    """Else a trainer of nine lanes could not start."""
    server = KeyServer(grant(), **FEW, envs_per_worker=100)
    for number in range(100, 112):
        assert server.attach(session=number).type is GIVEN
    assert len(server.pools) == 8
    for now in (0.5, 1.0, 1.5, 2.0):
        for number in range(108, 112):
            assert server.attach(session=number, now=now).type in (GIVEN, GRANTED)
        assert len(server.pools) == 8 + 2 * now


def test_who_has_no_key_attaches_as_fast_as_it_likes() -> None:
    server = KeyServer(**FEW, envs_per_worker=100)
    for _ in range(30):
        server.attach("local")
    assert len(server.pools) == 30


@pytest.mark.parametrize("way", ["built", "detached", "broken"])
def test_four_leases_of_a_user_are_built_at_a_time(way: str) -> None:
    server = KeyServer(grant(), grant("bob"), **FEW, envs_per_worker=100)
    server.builds_at_once = False
    for _ in range(8):
        assert server.attach().type is GIVEN
    assert list(server.pools) == [("ann", number) for number in range(1, 5)]
    server.attach("bob")
    assert ("bob", 9) in server.pools
    server.detach(("ann", 5))  # while it waits
    assert len(server.pools) == 5
    if way == "built":
        server.build(("ann", 2), 1.0)
    elif way == "detached":
        server.detach(("ann", 2))
    else:
        server.pools.pop(("ann", 2)).close()
        server.carry_out(
            server.session.pool_broken(("ann", 2), LookupError("x")),  # type: ignore[arg-type]
            1.0,
        )
    assert ("ann", 6) in server.pools
    assert ("ann", 7) not in server.pools


def test_rows_of_all_leases_of_a_user_share_its_memory() -> None:
    """How long rows are is known once envs are built: one lease after the other."""
    server = KeyServer(grant(max_row_mib=3), grant("bob"), **FEW, envs_per_worker=1000)
    server.builds_at_once = False
    for number in range(100, 103):
        server.attach(session=number, num_envs=100)
    server.attach("bob", session=103)
    assert set(server.pools) == {("ann", 100), ("bob", 103)}
    assert server.pools["ann", 100].config.max_row_mib == 3
    assert server.pools["bob", 103].config.max_row_mib is None
    server.build(("ann", 100), 0.0)  # less than a MiB counts as one
    assert server.pools["ann", 101].config.max_row_mib == 2
    server.detach(("ann", 100))
    server.build(("ann", 101), 0.0)
    assert server.pools["ann", 102].config.max_row_mib == 2


def test_the_hosts_limit_of_memory_holds_for_all_keys() -> None:
    server = KeyServer(grant(max_row_mib=3), grant("bob"), max_row_mib=2, **FEW)
    for user in ("ann", "bob", "local"):
        server.attach(user)
    assert {pool.config.max_row_mib for pool in server.pools.values()} == {2}


def test_a_key_may_use_envs_that_fit_its_patterns() -> None:
    server = KeyServer(grant(envs=("ALE/*", "Other-v0")))
    body = server.refuse(env_name="Fake-v0")
    assert body.code is ErrorCode.REFUSED
    assert body.text == (
        "ann may use ALE/* and Other-v0; requested Fake-v0; the operator can add it in "
        "the file clients"
    )
    assert server.num_audits("refused", "ann") == 1
    for name in ("ALE/Pong-v5", "Other-v0"):
        server.attach(env_name=name)
    assert len(server.pools) == 2
    body = server.refuse(env_name="ALE/Tetris-v5")
    assert body.code is ErrorCode.UNKNOWN_ENV


def welcome(server: KeyServer, user: str) -> Welcome:
    body = Hello().encode()
    answer = server.say(user, MessageType.HELLO, boot=0, body=body)
    return Welcome.decode(answer.body)


def test_a_client_is_told_of_what_it_may_have() -> None:
    server = KeyServer(grant(envs=("ALE/*",), max_envs=3))
    server.attach(env_name="ALE/Pong-v5", num_envs=2)
    server.attach("local", num_envs=4)
    told = welcome(server, "ann")
    assert (told.env_names, told.num_names) == (("ALE/Pong-v5",), 1)
    assert (told.total_envs, told.free_envs) == (3, 1)
    told = welcome(server, "local")
    assert (told.env_names, told.num_names) == (NAMES, 3)
    assert (told.total_envs, told.free_envs) == (16, 10)


def test_arguments_need_the_hosts_and_the_keys_permission() -> None:
    allowed = frozenset({"gravity", "mode:a|b"})
    key = grant(allowed_kwargs=("gravity:int[0,10]", "mode:a", "file:any"))
    server = KeyServer(key, allowed_kwargs=allowed)
    for kwargs in ({"gravity": 11}, {"mode": "b"}, {"file": "x"}, {"gravity": "1"}):
        body = server.refuse(env_kwargs=kwargs)
        assert body.code is ErrorCode.REFUSED
        assert f"env argument '{next(iter(kwargs))}'" in body.text
    server.attach(env_kwargs={"gravity": 10, "mode": "a"})
    server.attach("local", env_kwargs={"gravity": 11, "mode": "b"})
    assert len(server.pools) == 2


def test_a_lease_exposes_what_its_key_may_use() -> None:
    server = KeyServer(
        grant(exposed=("get:level",)), exposed=frozenset({"level", "set:level"})
    )
    for number, user in enumerate(("ann", "local"), 1):
        server.attach(user)
        record = server.session.leases[user, number]
        assert record.settings.exposed == (
            {"get:level"} if user == "ann" else {"level", "set:level"}
        )


def test_a_key_that_is_not_good_any_more_is_refused_everything() -> None:
    server = KeyServer(grant())
    server.attach()
    server.grants.clear()
    body = server.refuse()
    assert body.code is ErrorCode.REFUSED
    assert body.text.startswith("the key of ann is not valid any more: ")
    answer = server.say("ann", MessageType.HELLO, boot=0, body=Hello().encode())
    assert ErrorBody.decode(answer.body).code is ErrorCode.REFUSED


def test_numbers_of_sessions_are_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reads one must not be able to end what is another's."""
    number = 0xC0FFEE0123456789
    server = KeyServer(grant())
    with caplog.at_level("DEBUG"):
        body = make_attach(num_envs=1).encode()
        server.say("ann", MessageType.ATTACH, session=number, body=body)
        assert server.session.leases.name_of(("ann", number)) == "lease 1 of ann"
        server.detach(("ann", number))
    assert "lease 1 of ann: 1 Fake-v0, ended (detached)" in caplog.text
    for text in (f"{number:x}", str(number)):
        assert text not in caplog.text
    assert server.session.leases.name_of(("ann", number)) == "a lease that has ended"


def test_who_lost_its_key_is_told_so_once() -> None:
    server = KeyServer(grant(), grant("bob"))
    for user in ("ann", "bob"):
        server.attach(user)
    leases = server.session.leases
    first, second = leases.close_users({"ann"}), leases.close_users({"ann"})
    assert [type(decision).__name__ for decision in first] == ["Reply", "EndPool"]
    assert not second
    assert server.session.refusals == {"LEASE_LOST": 1}
