"""Sets a server up, runs it until it is told to stop, and takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import Final

import zmq

from envserve.errors import ServerError
from envserve.pool.launcher import Launcher
from envserve.registry import Registry
from envserve.server.process import LoopLag, StopSignals, raise_file_limit
from envserve.server.shell import RouterShell
from envserve.session import Health, ServerSession
from envserve.settings import HostSettings, is_private
from envserve.transport import set_common_options

__all__ = ["serve"]

_LOGGER: Final = logging.getLogger(__name__)
_SEND_LIMIT: Final = 64  # replies that wait for one slow reader; they may be large
_RECEIVE_LIMIT: Final = 256  # messages of one client that wait to be read
_BACKLOG: Final = 128
_HANDSHAKE_MS: Final = 2000
_STOP_SECONDS: Final = 1.5
#: The process should be gone a second after the grace period.
_AFTER_DRAIN_SECONDS: Final = 0.8
#: How long the last replies may take to leave.
_LINGER_MS: Final = 100


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
      ServerError: An address cannot be listened on.
      UnknownEnv: A name to offer is not registered.
      EnvStartError: A module cannot be imported.
    """
    loop = asyncio.get_running_loop()
    raise_file_limit()
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(StopSignals(loop))
        # Early, so that it imports while this process does.
        launcher = Launcher(config.import_modules, config.env_names or ())
        stack.callback(launcher.close)
        registry = Registry(config.env_names, config.import_modules)
        lag = LoopLag(loop)
        stack.callback(lag.stop)
        session = ServerSession(
            config,
            registry,
            boot=secrets.randbits(64) | 1,
            check_health=lambda: Health(
                is_starting=not launcher.has_imported, loop_lag_seconds=lag.seconds
            ),
        )
        socket, addresses = stack.enter_context(_bound_socket(config))
        shell = RouterShell(socket, session, launcher, loop)
        cut_short = ""
        try:
            _warn_of_public(config)
            on_ready(addresses, len(registry.names))
            await signals.asked.wait()
            if config.drain_grace_seconds and not signals.at_once.is_set():
                cut_short = await _drain(shell, signals, config.drain_grace_seconds)
            _LOGGER.info("stopping")
        finally:
            seconds = _AFTER_DRAIN_SECONDS if cut_short else _STOP_SECONDS
            await shell.stop(seconds, cut_short)


async def _drain(shell: RouterShell, signals: StopSignals, grace_seconds: float) -> str:
    """Lets running episodes end; returns what has cut that short, if anything has."""
    if await signals.wait_for(shell.drain(grace_seconds), grace_seconds):
        return ""
    if signals.at_once.is_set():
        return "it was told not to wait"
    return f"its grace period of {grace_seconds:g} s was over"


def _warn_of_public(config: HostSettings) -> None:
    for address in config.binds:
        if not is_private(address):
            _LOGGER.warning(
                "%s can be reached from other hosts: anybody there can use this "
                "server, and read and change its traffic",
                address,
            )


@contextlib.contextmanager
def _bound_socket(
    config: HostSettings,
) -> Iterator[tuple[zmq.Socket[bytes], tuple[str, ...]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = context.socket(zmq.ROUTER)
        set_common_options(socket)
        # Without it, replies that cannot be sent vanish unnoticed.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
        yield socket, tuple(_bind(socket, address) for address in config.binds)
    finally:
        context.destroy(linger=_LINGER_MS)


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Listens on an address; returns it with its real port."""
    socket.setsockopt(zmq.IPV6, "[" in address)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ServerError(
            f"cannot listen on {address}: {error.strerror}; is another server "
            f"running there?"
        ) from None
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    return bytes(endpoint).rstrip(b"\0").decode()
