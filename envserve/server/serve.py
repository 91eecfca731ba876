"""Starts all parts of a server, runs it until a signal arrives, and stops it."""

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

from envserve.envs.user_envs import env_name_of
from envserve.errors import ServerError, UnknownEnv
from envserve.keys import formats
from envserve.keys.key_folder import KeyFolder
from envserve.monitoring.metrics_port import MetricsPort
from envserve.pool.launcher import Launcher
from envserve.server.access import Access, run_self_test
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
from envserve.session.server.server_protocol import ServerProtocol
from envserve.settings import HostSettings
from envserve.text import did_you_mean
from envserve.wire.sockets import raise_file_limit

_LOGGER: Final = logging.getLogger(__name__)
#: Time limit of `ServerLoop.stop`, unless a drain was cut short.
_STOP_SECONDS: Final = 1.5
#: Seconds between two checks for revoked keys.
_REVOCATION_CHECK_SECONDS: Final = 1.0
#: Seconds between two warnings that no keys are used.
_NO_KEYS_WARNING_SECONDS: Final = 60.0
#: Seconds between two checks for SIGTERM and SIGINT while modules are imported.
_IMPORT_CHECK_SECONDS: Final = 0.1
#: Seconds for revoked clients to receive a notice before they are disconnected.
_REVOCATION_NOTICE_SECONDS: Final = 0.25
#: Maximum number of copies of a reply in memory until ZeroMQ has sent it.
_MAX_REPLY_COPIES: Final = 4
#: Number of file descriptors that a server with one client and two workers needs. With
#: fewer, ZeroMQ may abort the process.
_MIN_DESCRIPTORS: Final = 48
#: Maximum number of file descriptors to reserve for workers; never more than a quarter
#: of all descriptors are reserved.
_MAX_RESERVED_DESCRIPTORS: Final = 1024
_PR_SET_DUMPABLE: Final = 4
#: Time limit of `ServerLoop.stop` after a drain that was cut short: the process should
#: exit within a second after the grace period.
_AFTER_DRAIN_SECONDS: Final = 0.8


async def serve(
    settings: HostSettings, on_ready: Callable[[tuple[str, ...], int], None]
) -> None:
    """Serve until a signal arrives (see `ShutdownSignals`), or the task is cancelled.

    After SIGTERM or SIGHUP, running episodes may finish first; SIGINT or a second
    SIGTERM stops the server immediately.

    Args:
      settings: Settings.
      on_ready: Called with the actual addresses and the number of env names, once
        clients can connect.

    Raises:
      KeyFileError: A key file cannot be used, or no client has a key.
      SelfTestError: The server does not reject an unknown key.
      ServerError: The server cannot listen on an address or on the metrics port, or the
        limit of open files is too low.
      UnknownEnv: A name in `vector_envs` is not offered.
      EnvStartError: A module cannot be imported, or a name in `env_names` is not
        registered.
    """
    loop = asyncio.get_running_loop()
    if (num_descriptors := raise_file_limit()) < _MIN_DESCRIPTORS:
        raise ServerError(
            f"a server needs at least {_MIN_DESCRIPTORS} open files, but this process "
            f"may open at most {num_descriptors}; raise the hard limit (ulimit -n)"
        )
    _protect_memory_from_envs(settings.worker_user)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(ShutdownSignals(loop))
        metrics = None
        if settings.metrics_port is not None:
            metrics = stack.enter_context(
                MetricsPort(settings.metrics_port, settings.metrics_host)
            )
        notifier = Notifier(loop)
        stack.callback(notifier.close)
        # Start the launcher early, so that its imports run in parallel with the code
        # below.
        launcher = Launcher(
            settings.import_modules,
            (settings.env_names or ()) if settings.preload else None,
            num_reserved=min(num_descriptors // 4, _MAX_RESERVED_DESCRIPTORS),
            host=settings,
            lists_names=settings.preload,
        )
        stack.callback(launcher.close)
        names = await _offered_names(settings, launcher, signals.requested)
        if names is None:
            return
        sockets, access, zap, audit = await _open_sockets(settings, loop, stack)
        boot = secrets.randbits(64) | 1
        grant_of = None if access is None else access.grant_of
        protocol = ServerProtocol(settings, names, boot, grant_of)
        max_growth = partial(_max_buffered_bytes, settings, protocol)
        # Users with fewer connections are not the cause of a lack of descriptors.
        min_count = num_descriptors // 4
        stack.callback(ConnectionWatch(loop, sockets, zap, max_growth, min_count).stop)
        budget = SendBudget(
            settings.max_unread_mib << 20, settings.max_total_unread_mib << 20
        )
        router = Router(sockets, budget)
        server = ServerLoop(
            settings, router, protocol, launcher, signals.requested, access, audit
        )
        if metrics is not None:
            server.status.export_to(metrics, partial(_connection_counts, sockets, zap))
        key_task = asyncio.create_task(
            _close_revoked(access, server) if access else _warn_of_no_keys(settings)
        )
        abort_reason = ""
        try:
            on_ready(tuple(sockets.addresses), len(names))
            notifier.ready(f"serving on {' '.join(sockets.addresses)}")
            await signals.requested.wait()
            notifier.stopping()
            if settings.drain_grace_seconds and not signals.immediate.is_set():
                abort_reason = await _drain(
                    server, signals, settings.drain_grace_seconds
                )
            _LOGGER.info("stopping")
        finally:
            # End this task first: it could close connections before `stop` has notified
            # the clients that their sessions have ended.
            key_task.cancel()
            if metrics is not None:
                # Close the port in another thread, because a scrape may be waiting for
                # this loop. If no thread can be started, `stack` closes the port.
                with contextlib.suppress(RuntimeError):
                    await asyncio.to_thread(metrics.server_close)
            seconds = _AFTER_DRAIN_SECONDS if abort_reason else _STOP_SECONDS
            await server.stop(seconds, abort_reason)


def _protect_memory_from_envs(worker_user: str) -> None:
    """Protect this process's memory, and log which files envs can read."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0):
        _LOGGER.warning("envs can read this process's memory, because prctl failed")
    text = f"{worker_user}: envs cannot read the key files of this server's user"
    if not worker_user:
        text = (
            "this server's user: envs can read all of its files, including key files; "
            "to prevent this, start the server as root with --worker-user"
        )
    _LOGGER.info("workers run as %s", text)


async def _offered_names(
    settings: HostSettings, launcher: Launcher, stop: asyncio.Event
) -> tuple[str, ...] | None:
    """Wait until another process has imported the envs, and return their names.

    Return None if the server must stop before they are known.
    """
    with contextlib.ExitStack() as stack:
        if not settings.preload:  # the template of `launcher` imports nothing
            launcher = Launcher(
                settings.import_modules,
                settings.env_names or (),
                host=settings,
                lists_names=True,
            )
            stack.callback(launcher.close)
        while (names := launcher.wait_names(_IMPORT_CHECK_SECONDS)) is None:
            await asyncio.sleep(0)  # let the loop handle signals
            if stop.is_set():
                return None
    for name in map(env_name_of, settings.vector_envs):
        if name not in names:
            hint = did_you_mean(name, names)
            raise UnknownEnv(f"--vector: expected an offered env; got {name!r}{hint}")
    return names


def _max_buffered_bytes(settings: HostSettings, protocol: ServerProtocol) -> int:
    """Return the maximum memory growth caused by buffers, in bytes.

    The maximum is `max_buffered_mib` plus legitimate growth: copies of replies, some of
    them encrypted, and cached results.
    """
    leases = [record.lease for record in protocol.leases.values() if record.lease]
    replies = sum(_MAX_REPLY_COPIES * lease.max_result_bytes for lease in leases)
    cached = sum(lease.result_cache.num_bytes for lease in leases)
    return (settings.max_buffered_mib << 20) + replies + cached


async def _drain(
    server: ServerLoop, signals: ShutdownSignals, grace_seconds: float
) -> str:
    """Let running episodes finish; return the reason for stopping early, or ""."""
    if await signals.run_unless_immediate(server.drain(grace_seconds), grace_seconds):
        return ""
    if signals.immediate.is_set():
        return "a second signal requested an immediate stop"
    return f"its grace period of {grace_seconds:g} s has ended"


async def _open_sockets(
    settings: HostSettings,
    loop: asyncio.AbstractEventLoop,
    stack: contextlib.ExitStack,
) -> tuple[ServerSockets, Access | None, Zap | None, Callable[[Audit], None]]:
    """Listen, after verifying that only authorised clients can connect.

    Returns:
      The sockets; the keys and the ZAP handler, or None for both if no keys are used;
      and the callback that records an event in the audit log.
    """
    access = zap = None
    if not settings.insecure_no_auth and any(
        a.startswith("tcp:") for a in settings.binds
    ):
        access = Access(KeyFolder())
        access.check_binds(settings.binds)

    def describe(user: str) -> tuple[str, str]:
        grant = None if access is None else access.grant_of(user)
        fingerprint = "" if grant is None else formats.fingerprint(grant.public)
        return fingerprint, "" if zap is None else zap.addresses.get(user, "")

    audit: Callable[[Audit], None] = _ignore_event
    if settings.audit is not None:
        log = AuditLog(settings.audit, describe, loop)
        stack.callback(log.close)
        audit = log.write
    secret = None if access is None else access.keys.secret
    sockets = ServerSockets(
        settings.binds, settings.max_message_bytes, loop, secret, audit
    )
    stack.callback(sockets.close)
    if access is not None:
        zap = Zap(
            sockets.context,
            access.find_grant,
            loop,
            sockets.is_shut_out,
            audit,
            access.refresh.is_done,
        )
        stack.callback(zap.close)
        await run_self_test(sockets, zap, access.keys.public)
    sockets.listen()
    return sockets, access, zap, audit


def _ignore_event(event: Audit) -> None:
    """Ignore an event because there is no audit log."""


def _connection_counts(sockets: ServerSockets, zap: Zap | None) -> Mapping[str, int]:
    """Return the numbers of rejected keys and of calls to `reopen`, by metric name."""
    rejected = zap.counts["300"] + zap.counts["400"] if zap is not None else 0
    return {"refused_keys_total": rejected, "reopened_total": sockets.num_reopened}


async def _close_revoked(access: Access, server: ServerLoop) -> None:
    """Once a second, disconnect the users whose keys were revoked."""
    while True:
        await asyncio.sleep(_REVOCATION_CHECK_SECONDS)
        try:
            if revoked := access.find_revoked():
                server.end_sessions(revoked)
                # Give clients time to read the notice, because they lose unread
                # messages when their connection is closed.
                await asyncio.sleep(_REVOCATION_NOTICE_SECONDS)
                server.disconnect(revoked)
                access.forget_revoked()
        except Exception:
            _LOGGER.exception("the check for revoked keys failed, and will be repeated")


async def _warn_of_no_keys(settings: HostSettings) -> None:
    addresses = [a for a in settings.binds if a.startswith("tcp:")]
    while addresses:
        _LOGGER.warning(
            "no keys are used (--insecure-no-auth): anyone who can reach %s can use "
            "this server, and read and change its traffic",
            " or ".join(addresses),
        )
        await asyncio.sleep(_NO_KEYS_WARNING_SECONDS)
