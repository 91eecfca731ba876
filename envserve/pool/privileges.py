"""The user, the environment variables and the resource limits of env processes."""

from __future__ import annotations

import os
import pwd
import resource
from typing import Any, Final

from envserve.settings import HostSettings

#: Limit numeric libraries to one thread, because more threads would compete with the
#: other workers for cores.
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",  # macOS; its threads do not survive a fork
}
#: Variables that workers always inherit, even if `worker_env` does not name them.
_ALWAYS_INHERITED: Final = frozenset(
    ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR", "TZ")
)

#: Arguments of `resource.setrlimit`: the resource, and its soft and hard limit.
Limit = tuple[int, tuple[int, int]]


def popen_options(host: HostSettings | None) -> dict[str, Any]:
    """Return the user and the environment of the processes as arguments of `Popen`."""
    names = None if host is None else host.worker_env
    environment = {
        name: value
        for name, value in os.environ.items()
        if (not name.startswith("ENVSERVE_") if names is None else name in names)
        or name in _ALWAYS_INHERITED
    }
    options: dict[str, Any] = {"env": {**_ONE_THREAD, **environment}}
    if host is not None and host.worker_user:
        user = pwd.getpwnam(host.worker_user)
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        groups = groups[: os.sysconf("SC_NGROUPS_MAX")]  # macOS lists more than that
        name = user.pw_name
        options["env"] |= {"HOME": user.pw_dir, "LOGNAME": name, "USER": name}
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}
    return options


def resource_limits(host: HostSettings | None) -> list[Limit]:
    """Return the resource limits of the processes."""
    core = resource.RLIMIT_CORE  # no core files, unless an env raises the limit
    limits = [(core, (0, resource.getrlimit(core)[1]))]
    if host is not None:
        memory, processes = host.worker_memory_mib << 20, host.worker_processes
        requested = (resource.RLIMIT_AS, memory), (resource.RLIMIT_NPROC, processes)
        limits += [(kind, (limit, limit)) for kind, limit in requested if limit]
    return limits
