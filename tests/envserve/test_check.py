"""`envserve check` finds what is wrong with a server, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from envserve.check.rules import RULES
from envserve.cli.app import PROGRAM
from tests.command_line import Result, invoke
from tests.envserve.broken_servers import (
    DEFECTS,
    ClipsActions,
    StopsAfterABadEncoding,
)
from tests.envserve.checked_server import MemoryLink, Server, findings

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_nothing_is_found_in_a_server_that_keeps_the_rules() -> None:
    server = Server()
    found = list(findings(server))
    assert {(f.outcome, f.why) for f in found} == {("ok", "")}
    assert not server.pools


@pytest.mark.parametrize("broken", DEFECTS, ids=lambda kind: kind.__name__)
def test_a_defect_is_found(broken: type[Server]) -> None:
    found = next(f for f in findings(broken()) if f.name == DEFECTS[broken])
    assert found.outcome == "fail", found
    assert "expected" in found.why or "required" in found.why


def test_each_rule_stands_for_a_section_of_the_document() -> None:
    headings = re.findall(r"^##+ (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert {finding.section for finding in RULES} <= {*headings}


def check(server: Server, *options: str) -> Result:
    """Runs the command on a server, and on nothing but the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "envserve.client.link.probe.request_welcome", lambda *_, **__: None
        )
        link = "envserve.check.probe_client.SocketLink"
        patch.setattr(link, lambda address, insecure: MemoryLink(server))
        return invoke(PROGRAM, ["check", "127.0.0.1", *options])


@pytest.mark.parametrize(("kind", "code"), [(Server, 0), (ClipsActions, 1)])
def test_the_command_says_what_is_wrong(kind: type[Server], code: int) -> None:
    shown = check(kind())
    *lines, last = shown.output.splitlines()
    assert shown.exit_code == code
    assert last == f"{len(RULES) - code} ok, {code} fail, 0 skipped"
    line = "STEP: An action outside its space is refused"
    assert f"{'fail' if code else 'ok':8}{line}" in lines
    told = check(kind(), "--json", "--env", "Fake-v0")
    outcomes = [json.loads(line)["outcome"] for line in told.output.splitlines()]
    assert outcomes.count("fail") == code == told.exit_code


def test_an_env_that_is_not_there_fails_every_rule_that_needs_it() -> None:
    absent = check(Server(), "--env", "no-such-env")
    assert absent.exit_code == 1
    assert "expected GRANTED; got ERROR UNKNOWN_ENV" in absent.output


def test_nobody_is_asked_again_who_has_become_silent() -> None:
    ended = check(StopsAfterABadEncoding())
    assert ended.exit_code == 1
    assert "Error: expected an answer to HELLO; got none" in ended.output
    assert "GRANTED" not in ended.output
