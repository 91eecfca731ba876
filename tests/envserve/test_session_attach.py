"""From HELLO to the end of a lease: admission, repeats, silence, restarts."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from envserve import codec
from envserve.errors import (
    ConnectError,
    EnvsBusy,
    EnvserveError,
    EnvStartError,
    LeaseLost,
    ProtocolMismatch,
    RemoteProtocolError,
    ServerDraining,
    ServerError,
    ServerLost,
    UnknownEnv,
    WorkerError,
    WrapperError,
)
from envserve.session import ClientSession, ClientState, Policy
from envserve.wire import (
    Attach,
    Buffer,
    ErrorBody,
    ErrorCode,
    Executed,
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
    OneLease,
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
    server = FakeServer(policy=Policy(num_workers=3))
    client = attach(server, num_envs=8, num_splits=2)
    assert not SPEC.differences(client.spec)
    assert client.blocks == server.pools[11].blocks
    assert client.rows.reward.shape == (8,)


def test_the_pool_gets_what_was_asked_for() -> None:
    server = FakeServer(policy=Policy(num_workers=3, step_timeout_seconds=7))
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
    server = FakeServer(policy=Policy(num_workers=2, envs_per_worker=4))
    attach(server, num_envs=6)
    error = failed_client(server, num_envs=3)
    assert isinstance(error, EnvsBusy)
    assert "3 envs asked for, 2 of 8 free (leased: 6 of Fake-v0" in str(error)


def test_busy_names_who_has_most_envs_and_for_how_long() -> None:
    server = FakeServer(policy=Policy(num_workers=2, envs_per_worker=4))
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
    server = FakeServer(policy=Policy(num_workers=2, envs_per_worker=4))
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


@pytest.mark.parametrize(
    ("name", "value", "envs"),
    [
        ("spare_envs", True, "envs with spares"),
        ("wrappers", (WrapperSpec("FlattenObservation"),), "envs in wrappers"),
    ],
)
def test_a_server_that_does_not_know_what_was_asked_for_is_an_error(
    name: str, value: object, envs: str
) -> None:
    """It ignores what it does not know, and its rows would be other ones."""
    server = FakeServer()
    client = make_client(**{name: value})  # type: ignore[arg-type]
    client.connected(0.0)
    while client.state is not ClientState.LOST:
        for frames in take_outgoing(client):
            message = decode(frames)
            if message.type is MessageType.ATTACH:
                fields = codec.decode(message.body)
                assert fields.pop(name)
                body = codec.encode(fields)
                frames = encode(dataclasses.replace(message, body=body))
            server.receive(b"r", frames, 0.0)
        replies = server.take_replies()
        assert replies
        for frames in replies:
            client.receive(frames, 0.0)
    assert isinstance(client.error, RemoteProtocolError)
    assert f"tcp://fake:1: expected {envs}" in str(client.error)
    assert f"update the server, or leave out {name}" in str(client.error)


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
    policy = Policy(num_workers=1, allowed_kwargs=frozenset({"gravity"}))
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


def test_no_server_is_a_connect_error_at_the_deadline() -> None:
    client = make_client()
    client.advance(9.9)
    assert state_of(client) is ClientState.CONNECTING
    client.advance(10.0)
    assert isinstance(client.error, ConnectError)
    assert "tcp://fake:1" in str(client.error)
    assert "10 s" in str(client.error)


def test_a_server_that_hears_but_never_answers_is_a_connect_error() -> None:
    client = make_client()
    client.connected(1.0)
    now = 1.0
    while client.state is ClientState.HELLO_SENT:
        now = client.next_deadline()
        client.advance(now)
    assert isinstance(client.error, ConnectError)
    assert now == 10.0


def test_pings_keep_an_idle_lease() -> None:
    server = FakeServer()
    client = attach(server)
    now = 0.0
    while now < 200.0:
        now = client.next_deadline()
        client.advance(now)
        exchange(client, server, now)
        server.poll(now)
    assert state_of(client) is ClientState.READY
    assert server.pools


def test_a_silent_client_loses_its_lease() -> None:
    server = FakeServer()
    attach(server)
    assert server.session.next_deadline() == 60.0
    server.poll(59.9)
    assert server.pools
    server.poll(60.0)
    assert not server.pools
    assert server.session.free_envs == 128


def test_a_silent_server_is_lost_and_all_in_flight_fails() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 5.0, is_alone=True)
    while client.state is ClientState.READY:
        now = client.next_deadline()
        client.advance(now)
        take_outgoing(client)
    assert now == 65.0
    outcomes = client.take_finished()
    assert [outcome.block for outcome in outcomes] == [0, 1]
    assert all(isinstance(outcome.error, ServerLost) for outcome in outcomes)


def test_a_client_that_was_stopped_itself_does_not_blame_the_server() -> None:
    server = FakeServer()
    client = attach(server)
    client.advance(500.0)  # it slept; nothing it had sent is unanswered
    assert state_of(client) is ClientState.READY


def test_a_long_step_is_neither_lost_nor_resent_while_pongs_report_it() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 0.0)
    exchange(client, server, 0.0)
    steps = 0

    def count(frames: list[Buffer]) -> bool:
        nonlocal steps
        steps += decode(frames).type is MessageType.STEP
        return True

    now = 0.0
    while now < 300.0:
        now = client.next_deadline()
        client.advance(now)
        exchange(client, server, now, filter_request=count)
        server.poll(now)
    assert steps <= 3
    assert state_of(client) is ClientState.READY
    server.finish_all(now)
    exchange(client, server, now)
    assert len(client.take_finished()) == 2
    assert len(server.pools[11].executed) == 2


def test_a_server_restarted_while_attaching_is_asked_anew() -> None:
    first, second = FakeServer(boot=1, builds_at_once=False), FakeServer(boot=2)
    client = make_client()
    client.connected(0.0)
    exchange(client, first, 0.0)
    assert state_of(client) is ClientState.ATTACHING
    client.advance(1.0)
    exchange(client, second, 1.0)
    assert state_of(client) is ClientState.READY


def test_detaching_frees_the_envs_and_may_be_repeated() -> None:
    server = FakeServer()
    client = attach(server)
    client.begin_close(0.0)
    (frames,) = take_outgoing(client)
    server.receive(b"r", frames, 0.0)
    assert server.session.free_envs == 128
    server.receive(b"r", frames, 0.0)
    first, second = server.take_replies()
    client.receive(first, 0.0)
    client.receive(second, 0.0)
    assert state_of(client) is ClientState.CLOSED


def test_a_late_attach_does_not_revive_a_session_that_has_ended() -> None:
    server = FakeServer()
    client = make_client()
    client.connected(0.0)
    attaches: list[list[Buffer]] = []

    def keep(frames: list[Buffer]) -> bool:
        if decode(frames).type is MessageType.ATTACH:
            attaches.append(frames)
        return True

    exchange(client, server, 0.0, filter_request=keep)
    client.begin_close(0.0)
    exchange(client, server, 0.0)
    server.receive(b"r", attaches[0], 1.0)
    assert not server.pools
    assert server.session.free_envs == 128


def test_envs_are_free_only_when_their_workers_are_gone() -> None:
    server = FakeServer()
    attach(server, num_envs=100)
    detach = Message(type=MessageType.DETACH, session=11, boot=77, request=9)
    decisions = server.session.receive(b"r", encode(detach), 0.0)
    assert server.session.free_envs == 28
    server.carry_out(decisions, 0.0)
    assert server.session.free_envs == 128
    assert reply_types(server) == [MessageType.DETACHED]


def hello_of(client: ClientSession) -> list[Buffer]:
    client.connected(0.0)
    (frames,) = take_outgoing(client)
    return frames


def test_messages_that_only_servers_send_are_dropped() -> None:
    server = FakeServer()
    for kind in MessageType:
        if kind.is_from_server:
            message = Message(type=kind, session=11, boot=server.boot)
            server.receive(b"r", encode(message), 0.0)
    assert not server.replies


@pytest.mark.parametrize(
    "kind", [MessageType.STEP, MessageType.PING, MessageType.RESET, MessageType.CALL]
)
def test_unknown_sessions_are_told_that_they_have_nothing(kind: MessageType) -> None:
    server = FakeServer()
    message = Message(type=kind, session=5, boot=server.boot, attempt=0)
    server.receive(b"r", encode(message), 0.0)
    (reply,) = server.take_replies()
    body = ErrorBody.decode(decode(reply).body)
    assert body.code is ErrorCode.LEASE_LOST
    assert body.executed == 0


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


def test_a_message_that_met_a_defect_is_answered_and_ends_its_session_only() -> None:
    server = FakeServer()
    attach(server)
    attach(server, session=12)
    ping = Message(type=MessageType.PING, session=11, boot=server.boot, request=7)
    decisions = server.session.receive_failed(b"r", encode(ping))
    server.carry_out(decisions, 0.0)

    answer, farewell = map(decode, server.take_replies())
    assert (answer.request, answer.type) == (7, MessageType.ERROR)
    body = ErrorBody.decode(answer.body)
    assert (body.code, body.executed) == (ErrorCode.INTERNAL, Executed.UNKNOWN)
    assert ErrorBody.decode(farewell.body) == body
    assert list(server.pools) == [12]


def test_a_pool_that_broke_frees_its_envs_in_any_state() -> None:
    server = FakeServer()
    attach(server)
    decisions = server.session.pool_broken(11, ServerError("it broke"))
    server.carry_out(decisions, 0.0)
    (reply,) = server.take_replies()
    assert "it broke" in ErrorBody.decode(decode(reply).body).text
    assert server.session.free_envs == 128
    assert server.session.pool_broken(11, ServerError("again")) == []


def test_a_client_that_missed_its_sessions_end_learns_it_from_any_answer() -> None:
    server = FakeServer()
    client = attach(server, kind=OneLease)
    decisions = server.session.pool_broken(11, ServerError("it broke"))
    server.carry_out(decisions, 0.0)
    assert server.take_replies()  # and this one is lost
    client.submit_step([0], 1.0)
    exchange(client, server, 1.0)
    assert state_of(client) is ClientState.LOST
    assert isinstance(client.error, LeaseLost)
    assert "it broke" in str(client.error)


def test_a_lease_ends_at_the_very_deadline_that_was_asked_for() -> None:
    server = FakeServer()
    heard_at = 31.1  # adding 60 to it and taking it away again gives less than 60
    attach(server, heard_at)
    server.poll(server.session.next_deadline())
    assert not server.pools


@pytest.mark.parametrize("is_greeted", [False, True])
def test_copies_sent_to_a_server_before_do_not_end_an_attempt_to_attach(
    is_greeted: bool,
) -> None:
    client = make_client()
    client.connected(0.0)
    first = FakeServer(boot=1, builds_at_once=False)
    (hello,) = take_outgoing(client)
    first.receive(b"r", hello, 0.0)
    (welcome,) = first.take_replies()
    client.receive(welcome, 0.0)
    (attach_1,) = take_outgoing(client)

    second = FakeServer(boot=2)
    for _ in range(
        2
    ):  # the first tells that there is another server, the second is late
        second.receive(b"r", attach_1, 1.0)
    restarted, late = second.take_replies()
    client.receive(restarted, 1.0)
    (hello,) = take_outgoing(client)
    if is_greeted:
        second.receive(b"r", hello, 1.0)
        (welcome,) = second.take_replies()
        client.receive(welcome, 1.0)
    client.receive(late, 1.0)
    if not is_greeted:
        second.receive(b"r", hello, 1.0)
    exchange(client, second, 1.0)
    assert state_of(client) is ClientState.READY, client.error


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", [MessageType.RESULT, MessageType.CALL_RESULT])
def test_a_result_answers_no_request_to_attach(
    kind: MessageType, is_first: bool
) -> None:
    client = make_client() if is_first else attach(FakeServer(boot=1))
    server = FakeServer(boot=2)
    sent: list[Message] = []

    def note(frames: list[Buffer]) -> bool:
        sent.append(decode(frames))
        return sent[-1].type is MessageType.PING

    client.connected(1.0)
    exchange(client, server, 1.0, filter_request=note)
    hello = sent[-1]
    assert hello.type is MessageType.HELLO
    answer = Message(
        type=kind, session=hello.session, boot=server.boot, request=hello.request
    )
    client.receive(encode(answer), 1.0)
    assert client.late_messages == 1
    client.connected(1.1)
    exchange(client, server, 1.1)
    assert state_of(client) is ClientState.READY


def test_results_that_no_client_would_accept_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row_bytes = 8 + 3 + 2 * 16
    monkeypatch.setattr("envserve.session.server.MAX_RESULT_BYTES", 4 * row_bytes)
    attach(FakeServer(), num_envs=4)
    error = failed_client(FakeServer(), num_envs=5)
    assert isinstance(error, EnvStartError)
    assert f"results of 5 envs need up to {5 * row_bytes} bytes" in str(error)


def test_who_attaches_is_logged_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    hello = Hello(client="trainer\n\x1b[2J" + "x" * 150).encode()
    with caplog.at_level(logging.INFO, "envserve.session.server"):
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


def test_every_client_message_may_arrive_twice() -> None:
    """HELLO, ATTACH, RESET, STEP, CALL, PING and DETACH, each with its copy."""
    server = FakeServer()
    client = make_client()

    def deliver_twice(now: float) -> None:
        for _ in range(4):
            for frames in take_outgoing(client):
                server.receive(b"r", frames, now)
                server.receive(b"r", list(frames), now)
            for frames in server.take_replies():
                client.receive(frames, now)
                client.receive(list(frames), now)

    client.connected(0.0)
    deliver_twice(0.0)
    assert state_of(client) is ClientState.READY
    client.rows.action[0][:] = 3
    for step in range(3):
        client.submit_step([0, 1], step)
        deliver_twice(step)
        server.finish_all(step)
        deliver_twice(step)
        assert len(client.take_finished()) == 2
    client.advance(50.0)
    deliver_twice(50.0)
    assert len(server.pools[11].executed) == 6
    client.begin_close(51.0)
    deliver_twice(51.0)
    assert state_of(client) is ClientState.CLOSED
    assert server.session.free_envs == 128


def test_what_is_in_flight_is_sent_again_when_the_connection_is_made_anew() -> None:
    server = FakeServer()
    client = attach(server)
    client.submit_step([0, 1], 1.0)
    (first,) = take_outgoing(client)  # the connection swallows it
    client.connected(1.05)
    (second,) = take_outgoing(client)
    assert decode(second) == dataclasses.replace(decode(first), attempt=1)


def test_what_was_not_sent_yet_is_not_sent_twice() -> None:
    client = attach(FakeServer())
    client.submit_step([0, 1], 1.0)
    client.connected(1.05)
    (only,) = take_outgoing(client)
    assert decode(only).attempt == 0


def test_an_idle_client_pings_when_the_connection_is_made_anew() -> None:
    client = attach(FakeServer())
    assert client.next_deadline() > 0.1
    client.connected(0.1)
    (ping,) = take_outgoing(client)
    assert decode(ping).type is MessageType.PING
