"""From HELLO to a lease: versions, capacity, permissions, and what is asked for."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from envserve import codec
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
from envserve.session import ClientSession, ClientState
from envserve.settings import HostSettings
from envserve.wire import (
    Attach,
    Buffer,
    ErrorBody,
    ErrorCode,
    Hello,
    Message,
    MessageType,
    Welcome,
    decode,
    encode,
)
from envserve.wrappers import WrapperSpec
from tests.envserve.session_fakes import (
    SPEC,
    FakeServer,
    attach,
    exchange,
    make_attach,
    make_client,
    state_of,
    take_outgoing,
)


def failed_client(server: FakeServer, **changes: object) -> EnvserveError:
    client = make_client(session=99, **changes)  # type: ignore[arg-type]
    client.connected(0.0)
    exchange(client, server, 0.0)
    assert state_of(client) is ClientState.LOST
    assert client.error is not None
    assert "tcp://fake:1" in str(client.error)
    return client.error


def reply_types(server: FakeServer) -> list[MessageType | int]:
    return [decode(frames).type for frames in server.take_replies()]


def test_a_granted_client_knows_spaces_and_blocks() -> None:
    server = FakeServer(policy=HostSettings(num_workers=3))
    client = attach(server, num_envs=8, num_splits=2)
    assert not SPEC.differences(client.operations.spec)
    assert client.blocks == server.pools[11].blocks
    assert client.rows.reward.shape == (8,)


def test_the_pool_gets_what_was_asked_for() -> None:
    server = FakeServer(policy=HostSettings(num_workers=3, step_timeout_seconds=7))
    attach(
        server,
        num_envs=8,
        num_splits=2,
        seed=2**63 - 1,
        first_env_index=40,
        env_kwargs={"render_mode": "rgb_array"},
        autoreset="next_step",
        infos="none",
    )
    config = server.pools[11].config
    assert (config.num_envs, config.num_workers, config.num_splits) == (8, 3, 2)
    assert (config.seed, config.first_env_index) == (2**63 - 1, 40)
    assert config.env_kwargs == {"render_mode": "rgb_array"}
    assert (config.autoreset, config.infos) == ("next_step", "none")
    assert config.step_timeout_seconds == 7


def test_a_repeated_attach_gives_one_lease() -> None:
    server = FakeServer()
    client = make_client()
    client.connected(0.0)
    for frames in take_outgoing(client):
        server.receive(b"r", frames, 0.0)
    for frames in server.take_replies():
        client.receive(frames, 0.0)
    (frames,) = take_outgoing(client)
    server.receive(b"r", frames, 0.0)
    server.receive(b"r", frames, 0.1)

    replies = server.take_replies()
    assert [decode(reply).type for reply in replies] == [
        MessageType.BUILDING,
        MessageType.GRANTED,
        MessageType.GRANTED,
    ] or [decode(reply).type for reply in replies] == [
        MessageType.GRANTED,
        MessageType.BUILDING,
        MessageType.GRANTED,
    ]
    assert len({decode(r).epoch for r in replies if len(r[0]) > 200}) == 1
    assert len(server.pools) == 1
    assert server.session.free_envs == 128 - 4
    for reply in replies:
        client.receive(reply, 0.1)
    assert state_of(client) is ClientState.READY


def test_another_attach_in_the_same_session_is_refused() -> None:
    server = FakeServer()
    attach(server)
    other = Attach(env_name="Fake-v0", num_envs=5, seed=5)
    message = Message(
        type=MessageType.ATTACH, session=11, boot=server.boot, body=other.encode()
    )
    server.receive(b"r", encode(message), 0.0)
    assert reply_types(server) == [MessageType.ERROR]
    assert len(server.pools) == 1


def test_slow_construction_is_no_lost_server() -> None:
    server = FakeServer(builds_at_once=False)
    client = make_client()
    client.connected(0.0)
    now = 0.0
    while now < 100.0:
        exchange(client, server, now)
        client.advance(now)
        server.poll(now)
        now += 0.5
    assert state_of(client) is ClientState.ATTACHING
    server.build(11, now)
    exchange(client, server, now)
    assert state_of(client) is ClientState.READY


def test_unknown_env_names_near_matches() -> None:
    error = failed_client(FakeServer(), env_name="Fake-v1")
    assert isinstance(error, UnknownEnv)
    assert "did you mean Fake-v0?" in str(error)


def test_busy_says_how_many_are_free_and_who_has_the_others() -> None:
    server = FakeServer(policy=HostSettings(num_workers=2, envs_per_worker=4))
    attach(server, num_envs=6)
    error = failed_client(server, num_envs=3)
    assert isinstance(error, EnvsBusy)
    assert "3 envs asked for, 2 of 8 free (leased: 6 of Fake-v0" in str(error)


def test_busy_names_who_has_most_envs_and_for_how_long() -> None:
    server = FakeServer(policy=HostSettings(num_workers=2, envs_per_worker=4))
    attach(server, session=1, client="small:1", num_envs=2)
    attach(server, now=20.0, session=2, client="large:2\n", num_envs=5)
    client = make_client(now=50.0)
    client.connected(50.0)
    exchange(client, server, 50.0)
    error = client.error
    assert isinstance(error, EnvsBusy)
    assert not isinstance(error, ServerDraining)
    assert (error.holder, error.since) == ("large:2?", 30.0)
    assert (
        "(leased: 5 of Fake-v0 by large:2? for 30 s; 2 of Fake-v0 by small:1 for 50 s)"
    ) in str(error)


def test_asking_for_more_than_a_server_has_blames_nobody() -> None:
    error = failed_client(FakeServer(), num_envs=1000)
    assert isinstance(error, EnvsBusy)
    assert (error.holder, error.since) == ("", 0.0)


def test_envs_for_which_a_server_has_no_memory_could_not_be_started() -> None:
    server = FakeServer(builds_at_once=False)
    client = make_client()
    client.connected(0.0)
    exchange(client, server, 0.0)
    failure = WorkerError("no shared memory for the rows")
    server.carry_out(server.session.pool_failed(11, failure), 0.0)
    exchange(client, server, 0.0)
    assert isinstance(client.error, EnvStartError)


def test_spares_are_asked_for_and_count_as_envs() -> None:
    server = FakeServer(policy=HostSettings(num_workers=2, envs_per_worker=4))
    client = attach(server, num_envs=3, spare_envs=True)
    assert server.pools[11].config.spare_envs is True
    assert client.rows.reward.shape == (3,)
    assert server.session.free_envs == 2
    error = failed_client(server, num_envs=2, spare_envs=True)
    assert isinstance(error, EnvsBusy)
    assert (
        "4 envs asked for, half of them spares, 2 of 8 free (leased: 6 of Fake-v0"
    ) in str(error)


def test_without_spares_the_pool_is_as_before() -> None:
    server = FakeServer()
    attach(server)
    assert server.pools[11].config.spare_envs is False


def test_wrappers_reach_the_pool() -> None:
    server = FakeServer()
    wrappers = (WrapperSpec("ActionRepeat", {"amount": 4}),)
    attach(server, wrappers=wrappers)
    assert server.pools[11].config.wrappers == wrappers


def test_wrappers_that_are_not_known_are_refused() -> None:
    server = FakeServer()
    error = failed_client(server, wrappers=(WrapperSpec("ActionRepaet"),))
    assert isinstance(error, WrapperError)
    assert "tcp://fake:1: wrappers[0]: no wrapper named 'ActionRepaet'" in str(error)
    wrong = WrapperSpec("ActionRepeat", {"amount": 0})
    error = failed_client(server, wrappers=(wrong,))
    assert isinstance(error, WrapperError)
    assert "(ActionRepeat): amount: expected an int from 1 to 1000" in str(error)
    assert not server.pools


@pytest.mark.parametrize(
    "kwargs", [{"gravity": 9.8}, {"render_mode": "human"}, {"entry_point": "os:system"}]
)
def test_arguments_that_are_not_allowed_are_refused(kwargs: dict[str, object]) -> None:
    server = FakeServer()
    error = failed_client(server, env_kwargs=kwargs)
    assert isinstance(error, EnvStartError)
    assert "--allow-kwarg" in str(error)
    assert not server.pools


def test_arguments_that_are_allowed_reach_the_pool() -> None:
    policy = HostSettings(num_workers=1, allowed_kwargs=frozenset({"gravity"}))
    server = FakeServer(policy=policy)
    attach(server, env_kwargs={"gravity": 1.5})
    assert server.pools[11].config.env_kwargs == {"gravity": 1.5}


def test_envs_that_cannot_be_built_give_the_remote_traceback() -> None:
    server = FakeServer(builds_at_once=False)
    client = make_client()
    client.connected(0.0)
    exchange(client, server, 0.0)
    error = EnvStartError("no luck", remote_traceback="Traceback: boom")
    server.carry_out(server.session.pool_failed(11, error), 0.0)
    lost_reply = server.take_replies()
    assert lost_reply
    client.advance(1.0)
    exchange(client, server, 1.0)

    assert isinstance(client.error, EnvStartError)
    assert client.error.remote_traceback == "Traceback: boom"
    assert server.session.free_envs == 128


def test_versions_without_overlap_are_a_mismatch_on_either_side() -> None:
    server = FakeServer()
    client = make_client()
    client.connected(0.0)
    hello = Message(
        type=MessageType.HELLO,
        version=9,
        session=11,
        request=1,
        body=Hello(min_version=7, max_version=9).encode(),
    )
    server.receive(b"r", encode(hello), 0.0)
    (reply,) = server.take_replies()
    assert ErrorBody.decode(decode(reply).body).code is ErrorCode.VERSION_MISMATCH
    client.receive(reply, 0.0)
    assert isinstance(client.error, ProtocolMismatch)

    client = make_client()
    client.connected(0.0)
    welcome = Welcome(
        min_version=3,
        max_version=4,
        max_message_bytes=1,
        lease_seconds=1.0,
        env_names=(),
        num_names=0,
        total_envs=0,
        free_envs=0,
    )
    message = Message(
        type=MessageType.WELCOME, version=4, session=11, boot=5, body=welcome.encode()
    )
    client.receive(encode(message), 0.0)
    assert isinstance(client.error, ProtocolMismatch)
    assert "3 to 4" in str(client.error)


def test_unknown_fields_are_ignored_and_unknown_types_answered() -> None:
    server = FakeServer()
    unknown = Message(type=77, session=11, boot=server.boot, request=3)
    server.receive(b"r", encode(unknown), 0.0)
    (reply,) = server.take_replies()
    message = decode(reply)
    assert message.request == 3
    assert ErrorBody.decode(message.body).code is ErrorCode.UNSUPPORTED


def hello_of(client: ClientSession) -> list[Buffer]:
    client.connected(0.0)
    (frames,) = take_outgoing(client)
    return frames


@pytest.mark.parametrize("field", ["autoreset", "infos", "env_kwargs"])
def test_an_array_in_place_of_a_word_is_refused(field: str) -> None:
    """Compared with a str, it is an array, which is neither true nor false."""
    array = np.zeros(3)
    body = codec.decode(make_attach().encode())
    body[field] = {"render_mode": array} if field == "env_kwargs" else array
    server = FakeServer()
    message = Message(
        type=MessageType.ATTACH, session=5, boot=server.boot, body=codec.encode(body)
    )
    server.receive(b"r", encode(message), 0.0)
    (reply,) = server.take_replies()
    code = ErrorBody.decode(decode(reply).body).code
    expected = ErrorCode.REFUSED if field == "env_kwargs" else ErrorCode.BAD_MESSAGE
    assert code is expected


def test_results_that_no_client_would_accept_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_bytes = 8 + 3 + 2 * 16
    monkeypatch.setattr("envserve.session.claims.MAX_RESULT_BYTES", 4 * row_bytes)
    attach(FakeServer(), num_envs=4)
    error = failed_client(FakeServer(), num_envs=5)
    assert isinstance(error, EnvStartError)
    assert f"results of 5 envs need up to {5 * row_bytes} bytes" in str(error)


def test_who_attaches_is_logged_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    hello = Hello(client="trainer\n\x1b[2J" + "x" * 150).encode()
    with caplog.at_level(logging.INFO, "envserve.session"):
        for kind, body in (
            (MessageType.HELLO, hello),
            (MessageType.ATTACH, make_attach().encode()),
        ):
            boot = server.boot if kind is MessageType.ATTACH else 0
            message = Message(type=kind, session=5, boot=boot, body=body)
            server.receive(b"r", encode(message), 0.0)
    (line,) = [text for text in caplog.messages if "attaching" in text]
    assert "(client: trainer??[2Jxxx" in line
    assert len(line) < 150
