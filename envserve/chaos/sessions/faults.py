"""Faults, each of a kind, at a victim and for a time that are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envserve.chaos.sessions.profile import log_uniform
from envserve.errors import EnvError

if TYPE_CHECKING:
    from envserve.chaos.sessions.world import World

__all__ = ["strike"]


def strike(world: World, kind: str) -> None:
    """Lets one fault happen."""
    source, profile = world.clock.random, world.profile
    host, caller = source.choice(world.hosts), source.choice(world.callers)
    seconds = log_uniform(source, 0.01, profile.max_outage)
    soon = log_uniform(source, 0.01, 10.0)
    world.clock.note(kind, seconds)
    if kind == "crash_host":
        host.crash(soon)
    elif kind == "pause_host":
        host.pause(seconds)
    elif kind == "stop_host":
        host.do(host.stop)
    elif kind == "drain_host":
        host.do(host.drain, seconds)
    elif kind == "meet_defect":
        host.has_defect = True
    elif kind == "pause_caller":
        caller.pause(seconds)
    elif kind == "kill_caller":
        caller.kill()
    elif kind == "close_caller":
        caller.do(caller.close)
    elif kind == "reset_link":
        caller.lose_link(soon)
    elif kind == "cut_link":
        caller.link.cut(seconds, to_host=True, from_host=True)
    elif kind == "cut_one_way":
        to_host = source.random() < 0.5
        caller.link.cut(seconds, to_host=to_host, from_host=not to_host)
    elif host.granted:
        session = source.choice(list(host.granted))
        if kind == "lose_worker":
            worker = source.randrange(profile.num_workers)
            host.do(host.lose_worker, session, worker, soon)
        elif kind == "fail_pool":
            host.do(host.fail_pool, session, EnvError("the pool has failed"))
        elif kind == "break_pool":
            host.do(host.break_pool, session)
