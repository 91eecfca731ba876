"""Faults of each kind, with a random victim and duration."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from envserve.errors import EnvError
from envserve.wire.constants import MessageType
from envserve.wire.message import Buffer, decode, encode
from tests.simulation.endpoint import Endpoint
from tests.simulation.hijacker import OWNER
from tests.simulation.host import Host
from tests.simulation.profile import log_uniform
from tests.simulation.random_client import RandomClient

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

#: Types of operations that a faulty server may ignore.
OPERATIONS: Final = (MessageType.STEP, MessageType.RESET, MessageType.CALL)
#: A peer that is not a client but has a client's key.
STRAY: Final = (0, 0, OWNER)


def inject_fault(simulation: Simulation, kind: str) -> None:
    source, profile = simulation.clock.random, simulation.profile
    host = source.choice(simulation.hosts)
    client = (
        source.choice([*simulation.endpoints.values()])
        if simulation.endpoints
        else None
    )
    seconds = log_uniform(source, 0.1, profile.max_outage)
    soon = log_uniform(source, 0.01, 10.0)
    simulation.clock.record(kind, seconds)
    if kind == "crash_host":
        host.crash(soon)
    elif kind == "pause_host":
        host.pause(seconds)
    elif kind == "stop_host":
        host.run_when_awake(host.stop)
    elif kind == "drain_host":
        host.run_when_awake(host.drain, seconds)
    elif kind == "mute_host":
        host.mute(source.sample(OPERATIONS, source.randint(1, 3)), seconds)
    elif kind == "hang_host":
        host.hang(seconds)
    elif kind == "fail_message":
        host.fails_next_message = True
    elif host.granted and kind in ("lose_worker", "fail_pool", "break_pool"):
        session = source.choice(sorted(host.granted))
        if kind == "lose_worker":
            worker = source.randrange(profile.num_workers)
            host.run_when_awake(host.lose_worker, session, worker, soon)
        elif kind == "fail_pool":
            host.run_when_awake(
                host.fail_pool, session, EnvError("the pool has failed")
            )
        else:
            host.run_when_awake(host.break_pool, session)
    elif client is not None and kind == "move":
        client.run_when_awake(client.move, host)
    elif client is not None:
        _inject_client_fault(client, kind, seconds, soon)


def _inject_client_fault(
    client: Endpoint, kind: str, seconds: float, soon: float
) -> None:
    source = client.clock.random
    if kind == "pause_client":
        client.pause(seconds)
    elif kind == "kill_client" and isinstance(client, RandomClient):
        client.kill()
    elif kind == "close_client" and isinstance(client, RandomClient):
        client.run_when_awake(client.close)
    elif kind == "reset_link":
        client.disconnect(soon)
    elif kind == "cut_link":
        client.link.cut(seconds, to_host=True, from_host=True)
    elif kind == "send_stray" and client.link.host is not None:
        _send_stray(client.link.host, client.link.last_sent, source)
    elif kind == "cut_one_way":
        to_host = source.random() < 0.5
        client.link.cut(seconds, to_host=to_host, from_host=not to_host)


def _send_stray(host: Host, frames: Sequence[Buffer], source: random.Random) -> None:
    """Send a step as a peer with an old lease or wrong counters would."""
    if not frames or (message := decode(frames)).type is not MessageType.STEP:
        return
    message.request += 1_000_000
    message.body = bytes(len(message.body))  # all actions 0
    ahead = 1
    kind = source.randrange(3)
    if kind == 0:
        message.boot += 1_000_000
    elif kind == 1:
        message.epoch -= 1
    else:
        ahead = 1000
    message.entries = tuple((block, seq + ahead) for block, seq in message.entries)
    host.run_when_awake(host.receive, STRAY, encode(message))
