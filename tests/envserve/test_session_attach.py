"""From HELLO to a lease: versions, capacity and permissions."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest

from envserve.errors import (
    EnvsBusy,
    EnvserveError,
    EnvStartError,
    ProtocolMismatch,
    ServerDraining,
    UnknownEnv,
    WorkerError,
    WrapperError,
)
from envserve.session.client.attachment import attach_of
from envserve.session.client.liveness import Timeouts
from envserve.session.states import ClientState
from envserve.settings import HostSettings
from envserve.spaces import codec
from envserve.wire.bodies import Attach
from envserve.wire.constants import MAX_ATTACH_BYTES, ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.handshake import Hello
from envserve.wire.message import Message, decode, encode
from envserve.wrappers.specs import WrapperSpec
from tests.envserve.session_fakes import (
    ADDRESS,
    SPEC,
    FakeServer,
    attach,
    exchange,
    make_attach,
    make_client,
    make_pair,
    make_welcome,
    pass_time,
    state_of,
    take_outgoing,
    try_to_attach,
)


def failed_client(server: FakeServer, **changes: Any) -> EnvserveError:
    client = try_to_attach(server, session=99, **changes)
    assert state_of(client) is ClientState.LOST
    assert client.error is not None
    assert str(client.error).startswith("tcp://fake:1: ")
    return client.error


def test_a_granted_client_has_the_spaces_and_blocks_of_the_pool() -> None:
    server = FakeServer(policy=HostSettings(num_workers=3))
    client = attach(server, num_envs=8, num_splits=2)
    assert not SPEC.differences(client.client_blocks.spec)
    assert client.blocks == server.pools["", 11].blocks
    assert client.rows.reward.shape == (8,)


def test_the_memory_limit_of_a_client_may_be_infinite() -> None:
    client = attach(FakeServer(), timeouts=Timeouts(max_row_mib=math.inf))  # type: ignore[arg-type]
    assert client.state is ClientState.READY


def test_the_limit_of_envs_may_be_too_high_to_matter() -> None:
    policy = HostSettings(num_workers=16, envs_per_worker=2**32)
    _, client = make_pair(policy=policy)
    assert client.state is ClientState.READY


def test_the_pool_gets_the_arguments_of_the_attach() -> None:
    policy = HostSettings(
        num_workers=3,
        step_timeout_seconds=7,
        allowed_kwargs=frozenset({"gravity"}),
    )
    server = FakeServer(policy=policy)
    arguments: dict[str, Any] = {
        "num_envs": 8,
        "num_splits": 2,
        "seed": 2**63 - 1,
        "first_env_index": 40,
        "env_kwargs": {"render_mode": "rgb_array", "gravity": 1.5},
        "wrappers": (WrapperSpec("ActionRepeat", {"amount": 4}),),
        "autoreset": "next_step",
        "infos": "none",
        "spare_envs": True,
        "nonfinite": "pass",
        "strict_spaces": True,
    }
    attach(server, **arguments)
    config = server.pools["", 11].config
    assert {name: getattr(config, name) for name in arguments} == arguments
    assert (config.num_workers, config.step_timeout_seconds) == (3, 7)
    attach(server, session=12)
    assert server.pools["", 12].config.spare_envs is False


def test_a_repeated_attach_creates_one_lease() -> None:
    server = FakeServer()
    client = make_client()
    client.record_connect(0.0)
    for frames in take_outgoing(client):
        server.receive((b"r", ""), frames, 0.0)
    for frames in server.take_replies():
        client.receive(frames, 0.0)
    (frames,) = take_outgoing(client)
    server.receive((b"r", ""), frames, 0.0)
    server.receive((b"r", ""), frames, 0.1)

    replies = server.take_replies()
    *types, last = (decode(reply).type for reply in replies)
    assert sorted(types) == [MessageType.GRANTED, MessageType.BUILDING]
    assert last is MessageType.GRANTED
    assert len({decode(r).epoch for r in replies if len(r[0]) > 200}) == 1
    assert len(server.pools) == 1
    assert server.protocol.leases.num_free_envs == 128 - 4
    for reply in replies:
        client.receive(reply, 0.1)
    assert state_of(client) is ClientState.READY


def test_another_attach_in_the_same_session_is_rejected() -> None:
    server, _ = make_pair()
    other = Attach(env_name="Fake-v0", num_envs=5, seed=5).encode()
    (reply,) = server.replies_to(MessageType.ATTACH, body=other)
    assert reply.type is MessageType.ERROR
    assert len(server.pools) == 1


def test_a_client_waits_for_envs_that_are_built_slowly() -> None:
    server = FakeServer(builds_at_once=False)
    client = make_client()
    client.record_connect(0.0)
    now = pass_time(client, server, until=100.0)
    assert state_of(client) is ClientState.ATTACHING
    server.build(("", 11), now)
    exchange(client, server, now)
    assert state_of(client) is ClientState.READY


def test_a_short_lease_does_not_expire_during_the_build() -> None:
    server = FakeServer(HostSettings(lease_seconds=1.5), builds_at_once=False)
    client = try_to_attach(server)
    for now in np.arange(0.0, 20.0, 0.25):
        client.advance(now)
        exchange(client, server, now)
        server.poll(now)
        assert client.state is ClientState.ATTACHING, client.error


def test_arguments_that_would_be_too_long_after_a_loss_are_rejected_at_once() -> None:
    """The numbers in a later ATTACH take more bytes than those in the first one."""
    room = MAX_ATTACH_BYTES - len(make_attach(env_kwargs={"map": ""}).encode())
    attach_of(make_attach(env_kwargs={"map": "x" * (room - 20)}), ADDRESS)
    request = make_attach(env_kwargs={"map": "x" * (room - 2)})
    assert len(request.encode()) <= MAX_ATTACH_BYTES
    with pytest.raises(EnvStartError, match="4096"):
        attach_of(request, ADDRESS)


def test_a_busy_error_names_only_leases_of_the_same_client() -> None:
    server = FakeServer(policy=HostSettings(num_workers=2, envs_per_worker=4))
    attach(server, session=1, client_name="small:1", num_envs=2)
    attach(server, now=20.0, session=2, client_name="large:2\n", num_envs=5)
    for name, holder, leased in (
        (
            "large:2\n",
            ("large:2", 30.0),
            "5 of Fake-v0 by large:2 for 30 s; 2 by others",
        ),
        ("small:1", ("others", 0.0), "2 of Fake-v0 by small:1 for 50 s; 5 by others"),
        ("new:3", ("others", 0.0), "7 by others"),
    ):
        client = make_client(now=50.0, client_name=name)
        client.record_connect(50.0)
        exchange(client, server, 50.0)
        error = client.error
        assert isinstance(error, EnvsBusy)
        assert not isinstance(error, ServerDraining)
        assert (error.holder, error.held_seconds) == holder
        assert f"(leased: {leased})" in str(error)


def test_a_request_for_more_envs_than_exist_names_no_holder() -> None:
    error = failed_client(FakeServer(), num_envs=1000)
    assert isinstance(error, EnvsBusy)
    assert (error.holder, error.held_seconds) == ("", 0.0)


def test_spare_envs_count_as_leased() -> None:
    server = FakeServer(policy=HostSettings(num_workers=2, envs_per_worker=4))
    client = attach(server, num_envs=3, spare_envs=True)
    assert server.pools["", 11].config.spare_envs is True
    assert client.rows.reward.shape == (3,)
    assert server.protocol.leases.num_free_envs == 2
    error = failed_client(server, num_envs=2, spare_envs=True)
    assert isinstance(error, EnvsBusy)
    assert (
        "4 envs requested, half of them spares, 2 of 8 free (leased: 6 of Fake-v0"
    ) in str(error)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"env_name": "Fake-v1"}, UnknownEnv, "did you mean Fake-v0?"),
        ({"env_name": "Walk"}, UnknownEnv, "there is only Fake-v0; to offer another"),
        ({"env_kwargs": {"gravity": 9.8}}, EnvStartError, "--allow-kwarg"),
        ({"env_kwargs": {"render_mode": "human"}}, EnvStartError, "--allow-kwarg"),
        ({"env_kwargs": {"entry_point": "os:system"}}, EnvStartError, "--allow-kwarg"),
        (
            {"num_envs": 8192, "num_splits": 4096},
            *(EnvStartError, "at most 4,096 blocks; got 8,192"),
        ),
        # Workers reject unknown names: see `test_wrapped_envs`.
        (
            {"wrappers": (WrapperSpec("ActionRepeat", {"amount": 0}),)},
            *(WrapperError, "(ActionRepeat): amount: expected an int from 1 to 1000"),
        ),
    ],
)
def test_envs_and_arguments_that_are_not_offered_or_allowed_are_rejected(
    changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    server = FakeServer()
    error = failed_client(server, **changes)
    assert isinstance(error, kind)
    assert text in str(error)
    assert "?;" not in str(error)
    assert not server.pools


@pytest.mark.parametrize(
    ("failure", "traceback", "reason"),
    [
        (
            EnvStartError("no luck", remote_traceback="Traceback:\nValueError: boom"),
            "Traceback:\nValueError: boom",
            "no luck: ValueError: boom",
        ),
        (WorkerError("cannot allocate memory"), "", "cannot allocate memory"),
    ],
)
def test_a_failed_build_is_reported_with_the_remote_traceback(
    failure: EnvserveError,
    traceback: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeServer(builds_at_once=False)
    client = try_to_attach(server)
    with caplog.at_level("INFO"):
        server.carry_out(server.protocol.pool_failed(("", 11), failure), 0.0)
    assert caplog.text.endswith(f"ended ({reason})\n")
    assert server.take_replies()  # but the reply is lost
    client.advance(1.0)
    exchange(client, server, 1.0)
    assert isinstance(client.error, EnvStartError)
    assert client.error.remote_traceback == traceback
    assert str(client.error).startswith("tcp://fake:1: ")
    assert server.protocol.leases.num_free_envs == 128


def test_incompatible_versions_are_an_error_on_both_sides() -> None:
    server = FakeServer()
    client = make_client()
    client.record_connect(0.0)
    hello = Hello(min_version=7, max_version=9).encode()
    (reply,) = server.replies_to(
        MessageType.HELLO, version=9, boot=0, request=1, body=hello
    )
    assert reply.version == 9, "a client of any version can read it"
    assert ErrorBody.decode(reply.body).code is ErrorCode.VERSION_MISMATCH
    client.receive(encode(reply), 0.0)
    assert isinstance(client.error, ProtocolMismatch)
    text = (
        "tcp://fake:1: the server speaks protocol 2 to 2, this client 7 to 9; install"
    )
    assert str(client.error).startswith(text)

    client = make_client()
    client.record_connect(0.0)
    body = make_welcome(min_version=3, max_version=4).encode()
    message = Message(
        type=MessageType.WELCOME, version=4, session=11, boot=5, body=body
    )
    client.receive(encode(message), 0.0)
    assert isinstance(client.error, ProtocolMismatch)
    text = (
        "tcp://fake:1: the server speaks protocol 3 to 4, this client 2 to 2; install"
    )
    assert str(client.error).startswith(text)


def test_messages_of_unknown_types_are_answered_with_an_error() -> None:
    (reply,) = FakeServer().replies_to(77, request=3)
    assert reply.request == 3
    assert ErrorBody.decode(reply.body).code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize("field", ["autoreset", "infos", "env_kwargs"])
def test_an_array_in_place_of_a_string_is_rejected(field: str) -> None:
    """Comparing an array to a str returns an array, which has no truth value."""
    array = np.zeros(3)
    body = codec.decode(make_attach().encode())
    body[field] = {"render_mode": array} if field == "env_kwargs" else array
    (reply,) = FakeServer().replies_to(MessageType.ATTACH, body=codec.encode(body))
    code = ErrorBody.decode(reply.body).code
    expected = ErrorCode.REFUSED if field == "env_kwargs" else ErrorCode.BAD_MESSAGE
    assert code is expected


def test_a_lease_whose_results_would_be_too_long_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_bytes = 8 + 3 + 2 * 16
    monkeypatch.setattr(
        "envserve.session.server.lease_table.MAX_RESULT_BYTES", 4 * row_bytes
    )
    attach(FakeServer(), num_envs=4)
    error = failed_client(server := FakeServer(), num_envs=5)
    assert isinstance(error, EnvStartError)
    assert f"results of 5 envs need up to {5 * row_bytes} bytes" in str(error)
    assert not server.audits  # the lease has neither begun nor ended


def test_the_name_of_a_client_is_logged_on_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeServer()
    hello = Hello(client="trainer\n\x1b[2J" + "x" * 150).encode()
    with caplog.at_level(logging.DEBUG, "envserve.session"):
        server.replies_to(MessageType.HELLO, boot=0, body=hello)
        server.replies_to(MessageType.ATTACH, body=make_attach().encode())
    (line,) = [text for text in caplog.messages if "attaching" in text]
    assert r"(client: trainer\n\x1b[2Jxxx" in line
    assert len(line) < 150
