"""Run servers on a Ray cluster, and find their addresses by name.

Each server is a child process of a named Ray actor. If a node fails, Ray restarts its
actors on other nodes, at other addresses. Ray kills its clients when the head node
fails, so a trainer does not connect to Ray: a subprocess looks up the addresses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from envserve.errors import AddressError, ServerError
from envserve.python_process import main_command
from envserve.text import install_command

__all__ = ["EnvServers"]

_LOGGER: Final = logging.getLogger(__name__)
_READY: Final = "envserve: ready on "
#: Seconds until a warning reports servers that have not started.
_REPORT_SECONDS: Final = 20.0
#: Seconds between two checks whether Ray drains a server's node.
_DRAIN_POLL_SECONDS: Final = 1.0


class EnvServers(contextlib.AbstractContextManager["EnvServers"]):
    """Servers that run on the nodes of a Ray cluster until this process exits.

    If a server or its node fails, Ray restarts the server where it has capacity. A
    server that was stopped is not restarted. If Ray drains a node that is about to be
    shut down, its servers drain too, and are restarted on other nodes. Keys are not
    sent through Ray: each server uses the keys on its node.

    At the end of a `with` block, the servers have 60 s to drain. If their --drain-grace
    is longer, call `stop` with a longer timeout before that.
    """

    def __init__(
        self,
        num_servers: int,
        options: Sequence[str] = (),
        *,
        resources: Mapping[str, float] | None = None,
        address: str = "ray://default/envs",
        start_timeout: float = 300.0,
    ) -> None:
        """Start the servers, spread over the nodes, and wait until all are ready.

        Args:
          num_servers: Number of servers.
          options: Arguments of `envserve start`, like ["CartPole-v1", "--workers",
            "8"]. Each server listens on a free port of its node's address.
          resources: Ray resources to reserve for each server; by default {"CPU": 1}.
          address: Address ray://namespace/name at which clients find the servers. If
            servers with this address already exist, the new ones are added to them.
          start_timeout: Maximum seconds until all servers are ready.

        Raises:
          AddressError: There is no Ray cluster, or `address` is malformed.
          ServerError: A server does not start, or Ray has no capacity for it.
        """
        ray, needs = connect_to_cluster(), {"CPU": 1, **(resources or {})}
        custom = {**needs}
        builtin = {"num_cpus": custom.pop("CPU"), "num_gpus": custom.pop("GPU", 0)}
        namespace, name = self._place = parse(address)
        self._actors: list[Any] = []
        placed = {"namespace": namespace, "scheduling_strategy": "SPREAD", **builtin}
        others = [actor["name"] for actor in _named_actors(ray, namespace, name)]
        first = int(others[-1].rpartition("/")[2]) + 1 if others else 0
        try:
            actor = ray.remote(max_restarts=-1, resources=custom, **placed)(_Server)
            for number in range(first, first + num_servers):
                server = actor.options(name=f"{name}/{number}")
                self._actors.append(server.remote([*options]))
            waiting = [actor.address.remote() for actor in self._actors]
            soon, num = min(_REPORT_SECONDS, start_timeout), len(waiting)
            if late := ray.wait(waiting, num_returns=num, timeout=soon)[1]:
                _LOGGER.warning(_late_text(ray, len(late), num, needs, soon))
            start_timeout -= soon if late else 0
            for found, output in ray.get(waiting, timeout=start_timeout):
                if not found:
                    raise ServerError(f"{address}: {output}")
        except BaseException as error:
            self._stop(10)
            if not isinstance(error, ray.exceptions.RayError | ValueError):
                raise
            text = f"{last_line(error)}; see `ray status` and `ray list actors`"
            raise ServerError(f"{address}: {text}") from None

    def addresses(self) -> list[str]:
        """Return the addresses of the servers that are ready.

        Raises:
          AddressError: No server is ready, or the cluster cannot be reached.
        """
        return addresses(*self._place)

    def stop(self, timeout: float = 60.0) -> None:
        """Stop the servers with SIGTERM, so that running episodes can finish.

        Args:
          timeout: Seconds until servers are killed; should exceed their --drain-grace.
        """
        num_servers = len(self._actors)
        if num_killed := self._stop(timeout):
            _LOGGER.warning(
                "%d of %d servers had not stopped after %g s and were killed; their "
                "running episodes are lost; call stop() with a timeout that exceeds "
                "--drain-grace",
                num_killed,
                num_servers,
                timeout,
            )

    def _stop(self, timeout: float) -> int:
        """Stop the servers; return the number of those that had to be killed."""
        actors, self._actors = self._actors, []
        if not actors:
            return 0
        ray = connect_to_cluster()
        ended = [actor.end.remote() for actor in actors]
        _, late = ray.wait(ended, num_returns=len(ended), timeout=timeout)
        for actor in actors:
            ray.kill(actor)
        return len(late)

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server:
    """Ray actor that runs `envserve start` on its node until the server exits."""

    def __init__(self, options: Sequence[str]) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        bind = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        command = ["envserve.__main__", "start", "--bind", bind, *options]
        # Started in the main thread, because the kernel signals the child when the
        # thread that started it exits, and the main thread lives as long as the actor.
        self._process = subprocess.Popen(
            main_command(*command, ends_with_parent=True),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._last_output = "the server exited without output"
        self._address = self._forward_output()
        self._is_draining = False
        if self._address:
            for task in (self._watch, self._drain_with_node):
                threading.Thread(target=task, daemon=True).start()
        else:
            # The server has exited. Wait 10 s, so that `address` can report the reason,
            # before the actor exits and Ray restarts it.
            threading.Timer(10, os._exit, (1,)).start()

    def _forward_output(self) -> str:
        """Forward the server's output to Ray's log until it is ready or exits.

        Return the server's address; "" if it has exited.
        """
        for line in self._process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            if line.startswith(_READY):
                return line.removeprefix(_READY).split()[0]
            self._last_output = line.strip().removeprefix("Error: ")
        return ""

    def _watch(self) -> None:
        import ray

        # The method returns an address after each restart by --reload, and "" at exit.
        while self._forward_output():
            pass
        if self._process.wait() or self._is_draining:
            os._exit(1)  # Ray restarts the actor, unlike after `ray.kill`
        ray.kill(ray.get_runtime_context().current_actor)

    def _drain_with_node(self) -> None:
        """Drain the server when Ray drains its node, before the node is shut down."""
        import ray

        context = ray.get_runtime_context()
        # Ray Serve uses the same interface; there is no public one.
        client = ray._raylet.GcsClient(address=context.gcs_address)
        node = context.get_node_id()
        while node not in client.get_draining_nodes(timeout=_REPORT_SECONDS):
            time.sleep(_DRAIN_POLL_SECONDS)
        self._is_draining = True
        self._process.terminate()

    def address(self) -> tuple[str, str]:
        """Return the server's address ("" if it exited) and its last line of output."""
        return self._address, self._last_output

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def _late_text(
    ray: Any, num: int, total: int, needs: Mapping[str, float], seconds: float
) -> str:
    """Describe servers that have not started yet, and the resources of the nodes."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has = [{name: node.get(name, 0) for name in needs} for node in nodes]
    free = {name: ray.available_resources().get(name, 0) for name in needs}
    return (
        f"{num} of {total} servers have not started within {seconds:g} s: each "
        f"needs {dict(needs)}; the nodes have {has}, of which {free} is free in total; "
        "add nodes, or reduce --servers or --resources"
    )


def addresses(namespace: str, name: str) -> list[str]:
    """Return the addresses of the servers at ray://namespace/name that are ready.

    Raises:
      AddressError: No server is ready, there is no cluster, or Ray is not installed.
    """
    if getattr(sys.modules.get("ray"), "is_initialized", bool)():
        return _find(namespace, name)
    command = main_command(__name__, namespace, name)
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise AddressError("Ray did not reply within 60 s; see `ray status`") from None
    if found.returncode:
        text = f"a lookup in Ray exited with code {found.returncode}; see `ray status`"
        raise AddressError(last_line(found.stdout or found.stderr) or text)
    return found.stdout.split()


def _find(namespace: str, name: str) -> list[str]:
    ray, address = connect_to_cluster(), f"ray://{namespace}/{name}"
    requests, found = [], []
    for actor in _named_actors(ray, namespace, name):
        with contextlib.suppress(ValueError):  # the actor has just exited
            requests.append(ray.get_actor(**actor).address.remote())
    num = len(requests)
    ready = []
    if requests:  # do not wait long: the actor of a failed node never replies
        ready = ray.wait(requests, num_returns=num, timeout=1)[0]
        ready = ready or ray.wait(requests, num_returns=1, timeout=4)[0]
    for request in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # the actor is restarting
            found.append(str(ray.get(request)[0]))
    if not any(found):
        text = f"none of {num} servers is ready; see Ray's logs, or start servers with"
        raise AddressError(f"{address}: {text} `envserve start --on {address}`")
    return sorted(filter(None, found))


def _named_actors(ray: Any, namespace: str, name: str) -> list[dict[str, str]]:
    """Return name and namespace of each actor at ray://namespace/name, oldest first."""
    found = [
        actor
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == namespace
        and re.fullmatch(rf"{re.escape(name)}/\d+", actor["name"])
    ]
    return sorted(found, key=lambda actor: (len(actor["name"]), actor["name"]))


def scale_down(address: str, num_servers: int, timeout: float = 60.0) -> int:
    """Stop surplus servers at ray://namespace/name, the newest ones first.

    The servers let running episodes end, as after SIGTERM, and are not restarted.

    Args:
      address: Address ray://namespace/name.
      num_servers: Number of servers to keep.
      timeout: Maximum seconds to wait until the surplus servers have stopped.

    Returns:
      The number of servers that are left.

    Raises:
      AddressError: There is no Ray cluster, or `address` is malformed.
    """
    ray, place = connect_to_cluster(), parse(address)
    actors = _named_actors(ray, *place)
    ended = []
    for actor in actors[num_servers:]:
        with contextlib.suppress(ValueError):  # the actor has just exited
            ended.append(ray.get_actor(**actor).end.remote())
    if ended:
        ray.wait(ended, num_returns=len(ended), timeout=timeout)
    return min(len(actors), num_servers)


def parse(address: str) -> tuple[str, str]:
    """Split ray://namespace/name into namespace and name.

    Raises:
      AddressError: The address has a different form.
    """
    namespace, _, name = address.removeprefix("ray://").partition("/")
    if not (address.startswith("ray://") and namespace and name):
        raise AddressError(f"expected ray://namespace/name; got {address!r:.200}")
    return namespace, name


def connect_to_cluster(*, log_to_driver: bool = True) -> Any:
    """Connect to a running cluster, and return the `ray` module.

    Raises:
      AddressError: Ray is not installed, or no cluster can be reached.
    """
    # By default, Ray retries for a quarter of an hour if there is no cluster.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
    # Callers handle the errors of their tasks; Ray need not log them.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        import ray
    except ImportError:
        raise AddressError(
            f"Ray is not installed; run {install_command('ray')}"
        ) from None
    try:
        if not ray.is_initialized():
            ray.init("auto", log_to_driver=log_to_driver)
    except Exception as error:  # `ray.init` documents no exceptions
        reason = last_line(error) or f"{type(error).__name__} without a message"
        raise AddressError(
            f"cannot connect to a Ray cluster: {reason}; start one with `ray start`, "
            f"using the same Ray version as this process ({ray.__version__})"
        ) from None
    return ray


def last_line(error: object) -> str:
    """Return the last line of a message or error; Ray's errors end with their cause."""
    return str(error).strip().rpartition("\n")[2]


def main() -> None:
    """Print the addresses of the servers whose namespace and name are the arguments."""
    try:
        connect_to_cluster(log_to_driver=False)
        print(*_find(*sys.argv[1:]))
    except AddressError as error:
        sys.exit(print(error) or 1)
