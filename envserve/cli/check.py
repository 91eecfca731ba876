"""`envserve check`: test whether a server follows the protocol."""

from __future__ import annotations

import json
from typing import Final

from envserve.cli.options import THIS_HOST, Address, Env, Insecure, address_of
from envserve.cli.terminal import console

_COLOURS: Final = {"ok": "green", "fail": "red", "skipped": "yellow"}


def check(
    address: Address = THIS_HOST,
    *,
    env: Env = "",
    json_: bool = False,
    insecure: Insecure = False,
) -> int:
    """Check that a server, in any implementation, follows the protocol.

    The check leases up to 8 envs at a time and releases them. Exit codes: 0 if the
    server follows all rules, 1 if it breaks one or does not reply.

    Args:
      env: Name of the env to use; by default, the first one that the server offers.
      json_: Print one JSON object per rule.
    """
    from rich.text import Text

    from envserve.check.probe_client import ServerUnderTest, SocketLink
    from envserve.check.rules import check as check_rules
    from envserve.client.link.sessionless_requests import request_welcome

    address = address_of(address)
    out, counts = console(), dict.fromkeys(_COLOURS, 0)
    # If no server replies, this call raises an error that explains the reason.
    request_welcome(address, 5.0, insecure=insecure)
    subject = ServerUnderTest(lambda: SocketLink(address, insecure=insecure), env)
    for result in check_rules(subject):
        counts[result.outcome] += 1
        if json_:
            print(json.dumps(result._asdict()), flush=True)
            continue
        reason = f"\n        {result.why}" if result.why else ""
        outcome = f"{result.outcome:8}", _COLOURS[result.outcome]
        line = f"{result.section}: {result.title}{reason}"
        out.print(Text.assemble(outcome, line), soft_wrap=True)
    if not json_:
        print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return min(1, counts["fail"])
