"""`envserve doctor`: check this host and servers, and suggest a fix per problem."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

from envserve.cli.options import Insecure, Timeout
from envserve.cli.program import Option
from envserve.cli.terminal import styled
from envserve.errors import EnvserveError, KeyFileError
from envserve.python_process import python_command
from envserve.text import install_command

_COLOURS: Final = {"ok": 32, "warn": 33, "fail": 31}
_RENDER_TIMEOUT_SECONDS: Final = 20.0
#: For each rendering package: an env that it renders, and a remedy if rendering fails.
_RENDERERS: Final = {
    "pygame-ce": ("CartPole-v1", install_command("video")),
    "mujoco": (
        "InvertedPendulum-v5",
        "install libegl1 or libosmesa6, and set MUJOCO_GL=egl or MUJOCO_GL=osmesa",
    ),
}
_RENDER_SCRIPT: Final = (
    "import gymnasium, sys; env = gymnasium.make(sys.argv[1], render_mode='rgb_array');"
    "env.reset(); env.render()"
)
_Finding = dict[str, str]


def doctor(
    addresses: Annotated[tuple[str, ...], Option(metavar="ADDRESS")] = (),
    *,
    timeout: Timeout = 2.0,
    insecure: Insecure = False,
    json_: bool = False,
) -> int:
    """Check this host's libraries and resources for envs and training; suggest fixes.

    Exit codes: 0 if nothing fails (warnings are allowed), 1 otherwise.

    Args:
      addresses: Addresses of servers that must be reachable from this host.
      json_: Print a JSON list with one object per finding.
    """
    findings = []
    for finding in _all_findings(addresses, timeout, insecure):
        findings.append(finding)
        if not json_:
            print(_format(finding), flush=True)
    if json_:
        print(json.dumps(findings, indent=2))
    return int(any(finding["level"] == "fail" for finding in findings))


def _format(finding: _Finding) -> str:
    """Return a finding as text; if stdout is a terminal, wrap it to its width."""
    text = "; ".join(filter(None, (finding["text"], finding["remedy"])))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 16
    level = finding["level"]
    lines = textwrap.wrap(f"{finding['name']}: {text}", max(width - 6, 20))
    return styled(f"{level:<6}", _COLOURS[level], sys.stdout) + "\n      ".join(lines)


def _finding(
    name: str, text: str, remedy: str = "", *, fails: bool = False
) -> _Finding:
    level = "fail" if fails else "warn" if remedy else "ok"
    return {"name": name, "level": level, "text": text, "remedy": remedy}


def _all_findings(
    references: Sequence[str], timeout: float, insecure: bool
) -> Iterator[_Finding]:
    from envserve.client.link.discovery import resolve

    yield from (*_versions(), *_resources(), _port(), _keys())
    yield from map(_renderer, _RENDERERS)
    for reference in references:
        try:
            yield from (_server(host, timeout, insecure) for host in resolve(reference))
        except EnvserveError as error:
            yield _finding(reference, str(error), fails=True)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _is_extra_installed(lines: Sequence[str]) -> bool:
    """Return whether the requirements of an extra, one per line, are installed.

    Requirements for specific platforms may be missing.
    """
    exists = {line: bool(_version(re.split(r"[^\w.-]", line)[0])) for line in lines}
    return any(exists.values()) and all(
        is_installed or "sys_platform" in line for line, is_installed in exists.items()
    )


def _versions() -> Iterator[_Finding]:
    import zmq

    interpreter = sys.executable  # noqa: TID251
    yield _finding("Python", f"{sys.version.split()[0]}, {interpreter}")
    names = ("envserve", "gymnasium", "numpy", "pyzmq", "tensorflow", "tensorflow-cpu")
    versions = [f"{name} {_version(name)}" for name in names if _version(name)]
    yield _finding("packages", ", ".join([*versions, f"libzmq {zmq.zmq_version()}"]))
    extras: dict[str, list[str]] = {}
    for line in metadata.requires("envserve") or ():
        for extra in re.findall(r"extra == \"(.+?)\"", line):
            extras.setdefault(extra, []).append(line)
    installed = [extra for extra, lines in extras.items() if _is_extra_installed(lines)]
    missing = ", ".join(extra for extra in extras if extra not in installed) or "none"
    text = f"{', '.join(installed) or 'none'}; not installed: {missing}"
    yield _finding("extras", text)


def _resources() -> Iterator[_Finding]:
    from envserve.host_resources import cgroup_limits, num_cores
    from envserve.slab import anonymous_file

    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_limited = limit != resource.RLIM_INFINITY
    text = f"at most {limit}" if is_limited else "no limit"
    remedy = "allow 4096: ulimit -n, LimitNOFILE= or docker run --ulimit nofile="
    yield _finding("open files", text, remedy if is_limited and limit < 4096 else "")
    cores, total = num_cores(), os.cpu_count()
    reason = "" if cores == total else ", limited by a quota or CPU pinning"
    yield _finding("cores", f"{cores} of {total} for workers{reason}")
    if os.path.exists("/proc/meminfo"):
        lines = Path("/proc/meminfo").read_text().splitlines()
        gib = {columns[0]: int(columns[1]) / 2**20 for columns in map(str.split, lines)}
        limits = cgroup_limits(Path("/"), "memory", ("limit_in_bytes",))
        limit_gib = min([gib["MemTotal:"], *(bound[0] / 2**30 for bound in limits)])
        free = gib["MemAvailable:"]
        remedy = (
            "a worker needs about 0.1 GiB, a trainer 1.5 GiB; stop other processes, or "
            "raise the limit"
        )
        text = f"{free:.1f} of {gib['MemTotal:']:.1f} GiB free"
        if limit_gib < gib["MemTotal:"]:
            text += f", container limit {limit_gib:.1f}"
        yield _finding("memory", text, remedy if min(free, limit_gib) < 1 else "")
    try:
        with open(anonymous_file(), "wb") as file:
            file.write(bytes(1 << 20))
        yield _finding("shared memory", "available")
    except OSError as error:
        remedy = "allow memfd_create, which a container's seccomp profile may forbid"
        yield _finding("shared memory", str(error), remedy, fails=True)
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 16))
        yield _finding("temporary folder", f"{tempfile.gettempdir()} is writable")
    except OSError as error:
        remedy = (
            "ppo, bench, demo, videos and crash files need it; make room or set TMPDIR"
        )
        yield _finding("temporary folder", str(error), remedy)


def _port() -> _Finding:
    from envserve.address import DEFAULT_PORT

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError as error:
            remedy = (
                "unless your server uses it, choose another port: envserve start --bind"
            )
            return _finding("port", f"{DEFAULT_PORT}: {error.strerror}", remedy)
    return _finding("port", f"{DEFAULT_PORT} is free")


def _keys() -> _Finding:
    from envserve.keys.key_folder import KeyFolder
    from envserve.keys.private_files import display_path

    try:
        folder = KeyFolder()
        keys = {role: folder.key(role) for role in ("client", "server")}
        folder.clients.read()  # `grants` would only log an error
        num_clients = len(folder.clients.grants(time.time()))
        num_addresses = len(folder.pinned_addresses)
    except KeyFileError as error:
        return _finding("keys", str(error), fails=True)
    existing = " and ".join(f"a {role} key" for role, key in keys.items() if key)
    text = f"{display_path(folder.path)}: {existing or 'no key yet'}"
    text += f"; authorised clients: {num_clients}"
    return _finding("keys", f"{text}; known server addresses: {num_addresses}")


def _renderer(name: str) -> _Finding:
    """Check in a child process that a package can render; drivers may crash or hang."""
    from envserve.worker.rendering import headless_variables

    if not _version(name):
        return _finding(name, "not installed")
    env_name, remedy = _RENDERERS[name]
    variables = {**os.environ, **headless_variables(os.environ)}
    # glfw runs `python -c`, which would also import from the working directory.
    variables["PYTHONSAFEPATH"] = "1"
    try:
        subprocess.run(
            python_command(_RENDER_SCRIPT, env_name),
            env=variables,
            capture_output=True,
            check=True,
            timeout=_RENDER_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _finding(
            name, f"rendered nothing within {_RENDER_TIMEOUT_SECONDS:g} s", remedy
        )
    except subprocess.CalledProcessError as error:
        text = error.stderr.decode(errors="replace").strip() or str(error)
        return _finding(name, f"cannot render: {text.splitlines()[-1]}", remedy)
    backend = variables.get("MUJOCO_GL", "") if name == "mujoco" else ""
    return _finding(name, f"renders with {backend}" if backend else "renders")


def _server(address: str, timeout: float, insecure: bool) -> _Finding:
    from envserve.monitoring.observer import Observer

    started_at, version = time.monotonic(), _version("envserve")
    try:
        with Observer(address, insecure=insecure) as observer:
            status = observer.status(timeout)
    except EnvserveError as error:
        text = str(error).removeprefix(f"{address}: ")
        remedy = "" if ";" in text else "start a server there, or open its port"
        return _finding(address, text, remedy, fails=True)
    milliseconds = 1000 * (time.monotonic() - started_at)
    commit = f" (commit {status.commit})" if status.commit else ""
    text = (
        f"envserve {status.version}{commit}, {status.free_envs} of "
        f"{status.total_envs} envs free, replied after {milliseconds:.0f} ms"
    )
    remedy = f"this host has {version}: install the same release on both"
    return _finding(address, text, "" if status.version == version else remedy)
