"""How a server is set up, and what addresses it may listen on."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Final

from envserve.session import Policy

__all__ = ["ServerConfig", "is_private"]

_MIN_MESSAGE_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Set-up of a server. Durations are in seconds."""

    #: Most processes that one lease gets; with `envs_per_worker`, the capacity.
    num_workers: int
    envs_per_worker: int = 64
    #: Env names on offer; None for all that are registered.
    env_names: tuple[str, ...] | None = None
    #: Addresses to listen on: tcp://host:port (port 0: any that is free), ipc://path.
    binds: tuple[str, ...] = ("tcp://127.0.0.1:5555",)
    #: Modules that register envs when they are imported.
    import_modules: tuple[str, ...] = ()
    #: Attributes of envs that clients may get, set and call.
    exposed: tuple[str, ...] = ()
    #: Arguments of env constructors that clients may set.
    allowed_kwargs: tuple[str, ...] = ()
    lease_seconds: float = 60.0
    step_timeout_seconds: float = 30.0
    reset_timeout_seconds: float = 120.0
    padding_after_seconds: float = 0.1
    max_restarts: int = 5
    #: How long running episodes may go on after SIGTERM. What follows takes less than
    #: 2 s more, and whoever runs a container kills it after 10 s by default.
    drain_grace_seconds: float = 8.0
    #: Folder for repro files of crashes; see `PoolConfig`.
    crash_dir: str | None = ""
    #: Longest frame accepted from a client.
    max_message_bytes: int = _MIN_MESSAGE_BYTES
    #: Whether addresses that other hosts reach may be listened on.
    allows_public_binds: bool = False

    def __post_init__(self) -> None:
        """Checks everything; raises ValueError."""
        for name in ("num_workers", "envs_per_worker"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"expected {name} of at least 1; got {getattr(self, name)}"
                )
        for name in ("lease_seconds", "step_timeout_seconds", "reset_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} above 0; got {getattr(self, name)}")
        for name in ("padding_after_seconds", "max_restarts"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"expected {name} of at least 0; got {getattr(self, name)}"
                )
        if not 0 <= self.drain_grace_seconds < math.inf:
            raise ValueError(
                f"expected drain_grace_seconds of at least 0; "
                f"got {self.drain_grace_seconds}"
            )
        if self.max_message_bytes < _MIN_MESSAGE_BYTES:
            raise ValueError(
                f"expected max_message_bytes of at least {_MIN_MESSAGE_BYTES}; "
                f"got {self.max_message_bytes}"
            )
        if not self.binds:
            raise ValueError("expected at least one address to listen on")
        for address in self.binds:
            if not is_private(address) and not self.allows_public_binds:
                raise ValueError(
                    f"{address} can be reached from other hosts, and clients are not "
                    f"authenticated; bind to tcp://127.0.0.1 or ipc://, or accept "
                    f"that by --insecure-no-auth"
                )

    @property
    def policy(self) -> Policy:
        """What clients are allowed."""
        return Policy(
            num_workers=self.num_workers,
            envs_per_worker=self.envs_per_worker,
            allowed_kwargs=frozenset(self.allowed_kwargs),
            exposed=frozenset(self.exposed),
            lease_seconds=self.lease_seconds,
            step_timeout_seconds=self.step_timeout_seconds,
            reset_timeout_seconds=self.reset_timeout_seconds,
            padding_after_seconds=self.padding_after_seconds,
            max_restarts=self.max_restarts,
            crash_dir=self.crash_dir,
            max_message_bytes=self.max_message_bytes,
            import_modules=self.import_modules,
        )


def is_private(address: str) -> bool:
    """Tells whether only this host reaches an address.

    Args:
      address: Like "tcp://127.0.0.1:5555" or "ipc:///tmp/envs".

    Raises:
      ValueError: It is no such address.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return True
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port.isdigit() and int(port) < 65536):
        raise ValueError(
            f"expected an address like tcp://127.0.0.1:5555 or ipc:///path; "
            f"got {address!r}"
        )
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, an interface or *: whatever that may reach
        return False
