"""As whom the processes of envs run: their user, their environment, their limits."""

from __future__ import annotations

import os
import pwd
import resource
from typing import Any, Final

from envserve.settings import HostSettings

__all__ = ["Limit", "limits_of", "popen_options"]

#: One env needs one thread: more would fight over the cores with the other workers.
_THREADS: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
#: What workers get of our environment even if it is said what they get.
_ALWAYS: Final = frozenset(
    ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "TZ")
)

#: Arguments of `resource.setrlimit`.
Limit = tuple[int, tuple[int, int]]


def popen_options(host: HostSettings | None) -> dict[str, Any]:
    """Returns user and environment, as arguments of `Popen`; None for the usual."""
    names = None if host is None else host.worker_env
    environment = {
        name: value
        for name, value in os.environ.items()
        if (not name.startswith("ENVSERVE_") if names is None else name in names)
        or name in _ALWAYS
    }
    options: dict[str, Any] = {"env": {**_THREADS, **environment}}
    if host is not None and host.worker_user:
        user = pwd.getpwnam(host.worker_user)
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        name = user.pw_name
        options["env"] |= {"HOME": user.pw_dir, "LOGNAME": name, "USER": name}
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
    return options


def limits_of(host: HostSettings | None) -> list[Limit]:
    """Returns what the processes are held to."""
    core = resource.RLIMIT_CORE  # none are written, unless an env wants them
    limits = [(core, (0, resource.getrlimit(core)[1]))]
    if host is not None:
        memory, processes = host.worker_memory_mib << 20, host.worker_processes
        wanted = (resource.RLIMIT_AS, memory), (resource.RLIMIT_NPROC, processes)
        limits += [(kind, (limit, limit)) for kind, limit in wanted if limit]
    return limits
