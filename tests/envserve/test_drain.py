"""`envserve drain`: only the server's user can drain a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from envserve.cli.app import PROGRAM
from envserve.client.link.connection import Connection
from envserve.errors import ConnectError
from envserve.session.server.decisions import Audit, BeginDrain, Reply
from envserve.session.server.server_protocol import ServerProtocol
from envserve.settings import HostSettings
from envserve.wire.bodies import Drain
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.error_body import ErrorBody
from envserve.wire.message import Message, decode, encode
from tests.command_line import invoke
from tests.envserve.conftest import Join, Serve
from tests.envserve.test_server_keys import Homes
from tests.envserve.test_server_keys import homes as homes


def replies_to(user: str, times: int = 1) -> tuple[list[Message], int]:
    """Return the replies to a user's ASK_DRAIN, and the number of drains started."""
    host = HostSettings(drain_grace_seconds=8.0)
    protocol = ServerProtocol(host, (), boot=7)
    frames = encode(Message(MessageType.ASK_DRAIN, request=3, body=b"drain"))
    received = [
        protocol.receive((0, b"route", user), frames, 0.0) for _ in range(times)
    ]
    decisions = [decision for each in received for decision in each]
    assert all(isinstance(d, Reply | Audit | BeginDrain) for d in decisions)
    num_drains = sum(isinstance(decision, BeginDrain) for decision in decisions)
    return [decode(d.frames) for d in decisions if isinstance(d, Reply)], num_drains


def test_the_user_of_the_server_gets_the_grace_period_and_can_ask_again() -> None:
    replies, num_drains = replies_to("local", times=2)
    assert num_drains == 2
    assert len(replies) == 2
    for reply in replies:
        assert reply.type is MessageType.DRAIN
        assert (reply.request, reply.boot) == (3, 7)
        assert Drain.decode(reply.body).grace_ms == 8000


@pytest.mark.parametrize("user", ["anna", ""])
def test_other_users_cannot_drain_a_server(user: str) -> None:
    (reply,), num_drains = replies_to(user)
    body = ErrorBody.decode(reply.body)
    assert (reply.type, body.code) == (MessageType.ERROR, ErrorCode.REFUSED)
    assert "only the user who runs the server can drain it" in body.text
    assert not num_drains


def drain(*arguments: str) -> tuple[int, str]:
    result = invoke(PROGRAM, ["drain", *arguments])
    return result.exit_code, result.output


def test_the_command_waits_until_the_server_has_exited(
    serve: Serve, join: Join, homes: Homes
) -> None:
    server = serve("--drain-grace", "8", "--allow-kwarg", "length")
    client = join(server, 1, env_kwargs={"length": 1 << 40})
    client.reset()
    homes.authorise("anna")
    homes.pin("anna", server.address)
    code, text = drain(server.address)
    assert (code, server.process.poll()) == (1, None)
    assert (
        f"Error: {server.address}: only the user who runs the server can drain it"
        in text
    )
    homes.become("server")
    code, text = drain(server.address, "--timeout", "2")
    assert code == 3
    assert "the server is still draining after 2 s" in text
    code, text = drain(server.address)  # returns after the grace period
    assert (code, text) == (0, f"{server.address}: the server has drained and exited\n")
    assert "stopping" in server.end()
    assert server.process.returncode == 0


@pytest.mark.parametrize("boots", [[1, 1, 1, 2], [1, 0, 2], [1, 0, 0]])
def test_the_command_ends_when_another_server_or_none_replies(
    boots: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply_with(boots, monkeypatch)
    assert drain(f"ipc://{tmp_path}/server")[0] == 0
    assert not boots


def test_a_server_that_does_not_reply_to_the_request_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply_with([1, 0, 1], monkeypatch)
    assert drain(f"ipc://{tmp_path}/server") == (1, "Error: no reply\n")


def test_a_server_that_hangs_with_its_connection_open_is_still_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply_with([1, 1, 0, 0], monkeypatch)
    monkeypatch.setattr(Connection, "poll", lambda _: (False, True))
    code, text = drain(f"ipc://{tmp_path}/server", "--timeout", "0.001")
    assert (code, "still draining after" in text) == (3, True)


def reply_with(boots: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reply to requests with these boot ids; 0 for no reply."""

    def reply(_: Connection, asked: Message, kind: MessageType, __: float) -> Message:
        if not (boot := boots.pop(0)):
            raise ConnectError("no reply")
        return Message(kind, boot=boot)

    monkeypatch.setattr("envserve.client.link.sessionless_requests.request", reply)


def test_an_idle_server_that_exits_at_once_has_drained(serve: Serve) -> None:
    server = serve()
    assert drain(server.address)[1].endswith("the server has drained and exited\n")
    assert server.process.wait(10) == 0


def test_a_server_that_does_not_reply_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envserve.cli.drain._REPLY_SECONDS", 0.1)
    code, text = drain(f"ipc://{tmp_path}/nobody")
    assert code == 1
    assert "no server replied within 0.1 s" in text
