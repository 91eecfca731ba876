"""`envserve check` finds each server defect, and none in a correct server."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gymnasium import spaces

from envserve.check.probe_client import ServerUnderTest
from envserve.check.rules import RULES
from envserve.cli.app import PROGRAM
from envserve.errors import ConnectError
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.constants import ErrorCode, MessageType
from envserve.wire.handshake import Welcome
from envserve.wire.message import Message
from tests.command_line import Result, invoke
from tests.envserve.broken_servers import (
    DEFECTS,
    ClipsActions,
    StopsAfterABadEncoding,
    vars_of,
)
from tests.envserve.checked_server import Envs, MemoryLink, Server, findings

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_a_correct_server_passes_all_rules() -> None:
    server = Server()
    found = list(findings(server))
    assert {(f.outcome, f.why) for f in found} == {("ok", "")}
    assert not server.pools


@pytest.mark.parametrize(
    "action_space", [spaces.Tuple(()), spaces.Box(-1, 1, (0,), np.float32)]
)
def test_a_correct_server_passes_if_actions_have_no_values(
    action_space: spaces.Space[Any],
) -> None:
    class Passive(Envs):
        spec = EnvSpec("Fake-v0", Envs.spec.observation_space, action_space)

    class PassiveServer(Server):
        envs = Passive

    found = [f for f in findings(PassiveServer()) if f.outcome != "ok"]
    assert [(f.name, f.outcome) for f in found] == [("bad_actions", "skipped")]


def test_no_frame_is_sent_that_exceeds_the_memory() -> None:
    class Unlimited(Server):
        def change_reply(self, message: Message) -> Message:
            if message.type is MessageType.WELCOME:
                fields = vars_of(Welcome.decode(message.body))
                fields["max_message_bytes"] = 2**63 - 1
                message.body = Welcome(**fields).encode()
            return message

    found = [f for f in findings(Unlimited()) if f.outcome != "ok"]
    assert [(f.name, f.outcome) for f in found] == [("long_messages", "skipped")]


@pytest.mark.parametrize("broken", DEFECTS, ids=lambda kind: kind.__name__)
def test_each_defect_fails_its_rule(broken: type[Server]) -> None:
    found = next(f for f in findings(broken()) if f.name == DEFECTS[broken])
    assert found.outcome == "fail", found
    assert "expected" in found.why or "required" in found.why


def test_a_lease_that_is_not_released_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    subject = ServerUnderTest(lambda: MemoryLink(server))  # type: ignore[arg-type, return-value]
    clients = [subject.client().attach(num_envs=2) for _ in range(3)]
    monkeypatch.setattr(clients[1], "detach", mock.Mock(side_effect=ConnectError))
    with pytest.raises(ConnectError):
        subject.close_clients()
    assert len(server.pools) == 1


def test_an_error_is_in_time_even_long_after_the_last_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    subject = ServerUnderTest(lambda: MemoryLink(server))  # type: ignore[arg-type, return-value]
    client = subject.client()
    clock = mock.Mock(monotonic=lambda: time.monotonic() + 100)
    monkeypatch.setattr("envserve.check.probe_client.time", clock)
    client.expect_error(client.message(99), ErrorCode.UNSUPPORTED)


def test_each_rule_names_a_section_of_the_document() -> None:
    headings = re.findall(r"^##+ (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert {finding.section for finding in RULES} <= {*headings}


def check(server: Server, *options: str) -> Result:
    """Run the command on an in-process server, without a socket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "envserve.client.link.sessionless_requests.request_welcome",
            lambda *_, **__: None,
        )
        link = "envserve.check.probe_client.SocketLink"
        patch.setattr(link, lambda address, insecure: MemoryLink(server))
        return invoke(PROGRAM, ["check", "127.0.0.1", *options])


@pytest.mark.parametrize(("kind", "code"), [(Server, 0), (ClipsActions, 1)])
def test_the_command_prints_each_rule_with_its_outcome(
    kind: type[Server], code: int
) -> None:
    shown = check(kind())
    *lines, last = shown.output.splitlines()
    assert shown.exit_code == code
    assert last == f"{len(RULES) - code} ok, {code} fail, 0 skipped"
    line = "STEP: Reject actions outside the action space"
    assert f"{'fail' if code else 'ok':8}{line}" in lines
    result = check(kind(), "--json", "--env", "Fake-v0")
    outcomes = [json.loads(line)["outcome"] for line in result.output.splitlines()]
    assert outcomes.count("fail") == code == result.exit_code


def test_an_unknown_env_fails_all_rules_that_need_it() -> None:
    absent = check(Server(), "--env", "no-such-env")
    assert absent.exit_code == 1
    assert "expected GRANTED; got ERROR UNKNOWN_ENV" in absent.output


def test_the_check_ends_if_the_server_stops_replying() -> None:
    ended = check(StopsAfterABadEncoding())
    assert ended.exit_code == 1
    assert "Error: expected a reply to HELLO; got none" in ended.output
    assert "GRANTED" not in ended.output
