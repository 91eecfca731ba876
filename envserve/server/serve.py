"""Sets a server up, runs it until it is told to stop, and takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from envserve.envs.registry import Registry
from envserve.envs.user_envs import env_name_of
from envserve.errors import UnknownEnv
from envserve.keys import formats
from envserve.keys.key_folder import KeyFolder
from envserve.monitoring.metrics_port import MetricsPort
from envserve.pool.launcher import Launcher
from envserve.server.access import Access, check_refusal
from envserve.server.audit import Audit
from envserve.server.event_loop import RouterShell
from envserve.server.router import Router
from envserve.server.status import StatusBoard
from envserve.server.systemd import Notifier
from envserve.server.watchdogs import (
    ConnectionWatch,
    LoopLag,
    StopSignals,
    keep_from_envs,
)
from envserve.server.zmq_guards.send_budget import Unread
from envserve.server.zmq_guards.zap import Zap
from envserve.session.server.policy import Health
from envserve.session.server.server_session import ServerSession
from envserve.settings import HostSettings
from envserve.text import did_you_mean
from envserve.wire.sockets import raise_file_limit

__all__ = ["serve"]

_LOGGER: Final = logging.getLogger(__name__)
_STOP_SECONDS: Final = 1.5
#: How often it is looked whose key was taken away; and how often is warned of no keys.
_WATCH_SECONDS: Final = 1.0
_WARN_SECONDS: Final = 60.0
#: How long the last words to who was revoked may take.
_FAREWELL_SECONDS: Final = 0.25
#: How often an answer may stand in memory until it has left.
_COPIES: Final = 4
#: Descriptors that are kept for workers: a quarter, but never more.
_MAX_RESERVED: Final = 1024
#: The process should be gone a second after the grace period.
_AFTER_DRAIN_SECONDS: Final = 0.8


async def serve(
    config: HostSettings, on_ready: Callable[[tuple[str, ...], int], None]
) -> None:
    """Serves until SIGINT or SIGTERM, or until it is cancelled.

    SIGTERM lets running episodes end first; a second one, or SIGINT, does not wait.

    Args:
      config: Set-up.
      on_ready: Called with the real addresses and the number of env names, once
        clients can connect.

    Raises:
      KeyFileError: A file of keys cannot be used, or nobody would have a key.
      SelfTestError: Somebody would get in who should not.
      ServerError: An address, or a port for metrics, cannot be listened on.
      UnknownEnv: A name to offer is not registered, or a vector env not on offer.
      EnvStartError: A module cannot be imported.
    """
    loop = asyncio.get_running_loop()
    num_descriptors = raise_file_limit()
    keep_from_envs(config.worker_user)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(StopSignals(loop))
        metrics = None
        if config.metrics_port is not None:
            metrics = stack.enter_context(
                MetricsPort(config.metrics_port, config.metrics_host)
            )
        notifier = Notifier(loop)
        stack.callback(notifier.close)
        # Early, so that it imports while this process does.
        launcher = Launcher(
            config.import_modules,
            config.env_names or (),
            num_reserved=min(num_descriptors // 4, _MAX_RESERVED),
            host=config,
        )
        stack.callback(launcher.close)
        registry = _registry_of(config)
        lag = LoopLag(loop)
        stack.callback(lag.stop)
        router, access, zap = await _open_sockets(config, loop, stack)
        # Who made fewer connections has not taken all descriptors.
        many = num_descriptors // 4
        suspect = None if zap is None else partial(zap.take_suspect, many)
        session = ServerSession(
            config,
            registry,
            boot=secrets.randbits(64) | 1,
            check_health=lambda: Health(
                is_starting=not launcher.has_imported, loop_lag_seconds=lag.seconds
            ),
            enrol=access.enrol if access else None,
            grant_of=None if access is None else access.grant_of,
            drain=partial(_ask_drain, signals, config.drain_grace_seconds),
        )
        most = partial(_most_buffered, config, session)
        recycle = partial(_recycle, router, suspect)
        stack.callback(ConnectionWatch(loop, recycle, most).stop)
        shell = RouterShell(router, session, launcher, loop)
        board = StatusBoard(config, session, shell, loop)
        if metrics is not None:
            board.show_at(metrics, partial(_attacks, router, zap))
        session.questions.look = lambda s, asked: shell.pools[s].pool.looks.answer(
            asked
        )
        watch = _warn_of_no_keys(config) if access is None else _watch(access, shell)
        stack.callback(asyncio.create_task(watch).cancel)
        cut_short = ""
        try:
            on_ready(tuple(router.addresses), len(registry.names))
            notifier.ready(f"serving on {' '.join(router.addresses)}")
            await signals.asked.wait()
            notifier.stopping()
            if config.drain_grace_seconds and not signals.at_once.is_set():
                cut_short = await _drain(shell, signals, config.drain_grace_seconds)
            _LOGGER.info("stopping")
        finally:
            if metrics is not None:  # not in this thread, for which its own may wait
                await asyncio.to_thread(metrics.server_close)
            seconds = _AFTER_DRAIN_SECONDS if cut_short else _STOP_SECONDS
            await shell.stop(seconds, cut_short)


def _registry_of(config: HostSettings) -> Registry:
    """Imports what is offered; raises UnknownEnv for a vector env that is not."""
    registry = Registry(config.env_names, config.import_modules)
    for name in map(env_name_of, config.vector_envs):
        if name not in registry.names:
            hint = did_you_mean(name, registry.names)
            raise UnknownEnv(f"--vector: expected an env on offer; got {name!r}{hint}")
    return registry


def _most_buffered(config: HostSettings, session: ServerSession) -> int:
    """Returns how many bytes may be on their way: answers are copied, and encrypted."""
    leases = [claim.lease for claim in session.claims.values() if claim.lease]
    answers = sum(_COPIES * lease.max_result_bytes for lease in leases)
    kept = sum(lease.kept.num_bytes for lease in leases)
    return (config.max_buffered_mib << 20) + answers + kept


def _ask_drain(signals: StopSignals, grace_seconds: float) -> float:
    signals.asked.set()
    return grace_seconds


async def _drain(shell: RouterShell, signals: StopSignals, grace_seconds: float) -> str:
    """Lets running episodes end; returns what has cut that short, if anything has."""
    if await signals.wait_for(shell.drain(grace_seconds), grace_seconds):
        return ""
    if signals.at_once.is_set():
        return "it was told not to wait"
    return f"its grace period of {grace_seconds:g} s was over"


async def _open_sockets(
    config: HostSettings,
    loop: asyncio.AbstractEventLoop,
    stack: contextlib.ExitStack,
) -> tuple[Router, Access | None, Zap | None]:
    """Listens, once nobody can get in who should not."""
    access = zap = None
    if not config.insecure_no_auth and any(a.startswith("tcp:") for a in config.binds):
        access = Access(KeyFolder())
        access.check_binds(config.binds)
    secret = None if access is None else access.keys.secret
    mib = 1 << 20
    unread = Unread(config.max_unread_mib * mib, config.max_total_unread_mib * mib)
    router = Router(config.binds, config.max_message_bytes, loop, unread, secret)
    stack.callback(router.close)
    if access is not None:
        zap = Zap(router.context, access.find, loop, router.is_shut_out)
        stack.callback(zap.close)
        await check_refusal(router, zap, access.keys.public)
    if config.audit is not None:

        def describe(user: str) -> tuple[str, str]:
            grant = None if access is None else access.grant_of(user)
            shown = "" if grant is None else formats.fingerprint(grant.public)
            return shown, "" if zap is None else zap.addresses.get(user, "")

        stack.callback(Audit(config.audit, describe, loop).close)
    router.listen()
    return router, access, zap


def _recycle(
    router: Router, suspect: Callable[[], str] | None, why: str, is_of_number: bool
) -> None:
    """Blames whoever has made most connections, if it is for their number."""
    user = suspect() if suspect is not None else ""
    router.recycle(why, user if is_of_number else "")


def _attacks(router: Router, zap: Zap | None) -> Mapping[str, int]:
    """Returns how often somebody has met a closed door, or had all doors closed."""
    refused = zap.counts["300"] + zap.counts["400"] if zap is not None else 0
    return {"refused_keys_total": refused, "reopened_total": router.num_reopened}


async def _watch(access: Access, shell: RouterShell) -> None:
    """Ends what those have who may use the server no more."""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        try:
            if revoked := access.find_revoked():
                shell.end_leases(revoked)
                # Not at once: what a client has not read is lost with its connection.
                await asyncio.sleep(_FAREWELL_SECONDS)
                shell.shut_out(revoked)
                access.forget_revoked()
        except Exception:
            _LOGGER.exception("whose key was taken away could not be found out")


async def _warn_of_no_keys(config: HostSettings) -> None:
    addresses = [a for a in config.binds if a.startswith("tcp:")]
    while addresses:
        _LOGGER.warning(
            "no keys are used (--insecure-no-auth): whoever reaches %s can use this "
            "server, and read and change its traffic",
            " or ".join(addresses),
        )
        await asyncio.sleep(_WARN_SECONDS)
