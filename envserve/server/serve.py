"""Sets a server up, runs it until it is told to stop, and takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import secrets
import sys
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
from envserve.server.audit import AuditLog
from envserve.server.event_loop import ServerLoop
from envserve.server.router import Router
from envserve.server.signals import ShutdownSignals
from envserve.server.systemd import Notifier
from envserve.server.zmq_guards.connection_watch import ConnectionWatch
from envserve.server.zmq_guards.send_budget import SendBudget
from envserve.server.zmq_guards.server_sockets import ServerSockets
from envserve.server.zmq_guards.zap import Zap
from envserve.session.server.decisions import Audit
from envserve.session.server.server_session import ServerSession
from envserve.settings import HostSettings
from envserve.text import did_you_mean
from envserve.wire.sockets import raise_file_limit

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
_PR_SET_DUMPABLE: Final = 4
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
    _keep_from_envs(config.worker_user)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(ShutdownSignals(loop))
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
        sockets, access, zap, audit = await _open_sockets(config, loop, stack)
        boot = secrets.randbits(64) | 1
        grant_of = None if access is None else access.grant_of
        session = ServerSession(config, registry.names, boot, grant_of)
        most = partial(_most_buffered, config, session)
        # A user with fewer connections has not taken all descriptors.
        many = num_descriptors // 4
        stack.callback(ConnectionWatch(loop, sockets, zap, most, many).stop)
        limits = config.max_unread_mib << 20, config.max_total_unread_mib << 20
        router = Router(sockets, SendBudget(*limits))
        server = ServerLoop(
            config, router, session, launcher, signals.asked, access, audit
        )
        if metrics is not None:
            server.status.show_at(metrics, partial(_attacks, sockets, zap))
        watch = _warn_of_no_keys(config) if access is None else _watch(access, server)
        stack.callback(asyncio.create_task(watch).cancel)
        cut_short = ""
        try:
            on_ready(tuple(sockets.addresses), len(registry.names))
            notifier.ready(f"serving on {' '.join(sockets.addresses)}")
            await signals.asked.wait()
            notifier.stopping()
            if config.drain_grace_seconds and not signals.at_once.is_set():
                cut_short = await _drain(server, signals, config.drain_grace_seconds)
            _LOGGER.info("stopping")
        finally:
            if metrics is not None:  # not in this thread, for which its own may wait
                await asyncio.to_thread(metrics.server_close)
            seconds = _AFTER_DRAIN_SECONDS if cut_short else _STOP_SECONDS
            await server.stop(seconds, cut_short)


def _keep_from_envs(worker_user: str) -> None:
    """Keep other processes of this user from our memory, and log what envs can read."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0):
        _LOGGER.warning("envs can read this process's memory: prctl has failed")
    text = f"{worker_user}: envs cannot read the key files of this server's user"
    if not worker_user:
        text = (
            "this server's user: envs can read all of its files, key files as well; "
            "--worker-user keeps them apart"
        )
    _LOGGER.info("workers run as %s", text)


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
    leases = [record.lease for record in session.leases.values() if record.lease]
    answers = sum(_COPIES * lease.max_result_bytes for lease in leases)
    kept = sum(lease.result_cache.num_bytes for lease in leases)
    return (config.max_buffered_mib << 20) + answers + kept


async def _drain(
    server: ServerLoop, signals: ShutdownSignals, grace_seconds: float
) -> str:
    """Let running episodes end; return what has cut that short, or ""."""
    if await signals.wait_for(server.drain(grace_seconds), grace_seconds):
        return ""
    if signals.at_once.is_set():
        return "it was told not to wait"
    return f"its grace period of {grace_seconds:g} s was over"


async def _open_sockets(
    config: HostSettings,
    loop: asyncio.AbstractEventLoop,
    stack: contextlib.ExitStack,
) -> tuple[ServerSockets, Access | None, Zap | None, Callable[[Audit], None]]:
    """Listen, once it is certain that only authorised clients can connect."""
    access = zap = None
    if not config.insecure_no_auth and any(a.startswith("tcp:") for a in config.binds):
        access = Access(KeyFolder())
        access.check_binds(config.binds)

    def describe(user: str) -> tuple[str, str]:
        grant = None if access is None else access.grant_of(user)
        shown = "" if grant is None else formats.fingerprint(grant.public)
        return shown, "" if zap is None else zap.addresses.get(user, "")

    audit: Callable[[Audit], None] = _no_audit
    if config.audit is not None:
        log = AuditLog(config.audit, describe, loop)
        stack.callback(log.close)
        audit = log.write
    secret = None if access is None else access.keys.secret
    sockets = ServerSockets(config.binds, config.max_message_bytes, loop, secret, audit)
    stack.callback(sockets.close)
    if access is not None:
        zap = Zap(sockets.context, access.find, loop, sockets.is_shut_out, audit)
        stack.callback(zap.close)
        await check_refusal(sockets, zap, access.keys.public)
    sockets.listen()
    return sockets, access, zap, audit


def _no_audit(event: Audit) -> None:
    """Ignore an event, because there is no audit log."""


def _attacks(sockets: ServerSockets, zap: Zap | None) -> Mapping[str, int]:
    """Return how often keys were refused, and all connections were closed."""
    refused = zap.counts["300"] + zap.counts["400"] if zap is not None else 0
    return {"refused_keys_total": refused, "reopened_total": sockets.num_reopened}


async def _watch(access: Access, server: ServerLoop) -> None:
    """End the sessions of users whose keys were revoked."""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        try:
            if revoked := access.find_revoked():
                server.end_leases(revoked)
                # Not at once: what a client has not read is lost with its connection.
                await asyncio.sleep(_FAREWELL_SECONDS)
                server.shut_out(revoked)
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
