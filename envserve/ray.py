"""Servers on a Ray cluster: an actor each, placed by Ray, elsewhere if its node dies.

They are found by a name, in Ray's directory. Ray ends a process that is connected when
the cluster's head dies; so no trainer is: a process of its own asks for addresses.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from envserve.errors import AddressError, ServerError
from envserve.worker.orphans import code_tied_to_parent

__all__ = ["EnvServers"]

#: What an actor runs.
_RUN: Final = code_tied_to_parent("envserve.__main__")
_READY: Final = "envserve: ready on "


class EnvServers(contextlib.AbstractContextManager["EnvServers"]):
    """Servers on the nodes of a Ray cluster, which end with this process.

    One that fails, or whose node dies, is started again where there is room; one that
    was told to end is not. No key passes through Ray: those of its node are used.
    """

    def __init__(
        self,
        num_servers: int,
        options: Sequence[str] = (),
        *,
        resources: Mapping[str, float] | None = None,
        word: str = "ray://default/envs",
        start_timeout: float = 300.0,
    ) -> None:
        """Starts them, spread over the nodes, and waits until all are ready.

        Args:
          num_servers: How many.
          options: Of `envserve start`, like ["CartPole-v1", "--workers", "8"]. Each
            listens on its node's address, at a free port.
          resources: What Ray sets aside for each; by default {"CPU": 1}.
          word: ray://namespace/name, which stands for their addresses.
          start_timeout: Seconds until all must be ready.

        Raises:
          AddressError: There is no Ray cluster, or the word is none.
          ServerError: A server does not start, or Ray has no room for it.
        """
        ray, rest = connected(), {"CPU": 1, **(resources or {})}
        known = {"num_cpus": rest.pop("CPU"), "num_gpus": rest.pop("GPU", 0)}
        namespace, name = self._place = parse(word)
        self._actors: list[Any] = []
        placed = {"namespace": namespace, "scheduling_strategy": "SPREAD", **known}
        actor = ray.remote(max_restarts=-1, resources=rest, **placed)(_Server)
        try:
            for i in range(num_servers):
                self._actors += [actor.options(name=f"{name}/{i}").remote([*options])]
            waiting = [actor.address.remote() for actor in self._actors]
            for address, why in ray.get(waiting, timeout=start_timeout):
                if not address:
                    raise ServerError(f"{word}: {why}")
        except BaseException as error:
            self.stop(10)
            if not isinstance(error, ray.exceptions.RayError | ValueError):
                raise
            text = f"{last_line(error)} (ray status, ray list actors)"
            raise ServerError(f"{word}: {text}") from None

    def addresses(self) -> list[str]:
        """Returns the addresses of those that are ready now; raises AddressError."""
        return addresses(*self._place)

    def stop(self, timeout: float = 60.0) -> None:
        """Ends them as SIGTERM does, which lets episodes end.

        Args:
          timeout: Seconds until they are killed; more for a longer --drain-grace.
        """
        actors, self._actors = self._actors, []
        if ended := [actor.end.remote() for actor in actors]:
            ray = connected()
            ray.wait(ended, num_returns=len(ended), timeout=timeout)
            for actor in actors:
                ray.kill(actor)

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server:
    """An actor: has an `envserve start` on its node, and ends when that does."""

    def __init__(self, options: Sequence[str]) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        bind = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        # By the main thread, whose end is the actor's: that is what the kernel tells.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN, "start", "--bind", bind, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._said = "its server has ended"
        self._address = self._pass_on()
        if self._address:
            threading.Thread(target=self._watch, daemon=True).start()
        else:  # it says why, and is placed anew
            threading.Timer(10, os._exit, (1,)).start()

    def _pass_on(self) -> str:
        """Has Ray log what the server says; returns its address, or "" at its end."""
        for line in self._process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            if line.startswith(_READY):
                return line.removeprefix(_READY).split()[0]
            self._said = line.strip().removeprefix("Error: ")
        return ""

    def _watch(self) -> None:
        import ray

        while self._pass_on():  # again after a --reload
            pass
        if self._process.wait():
            os._exit(1)  # and Ray starts another, unless it was told to end
        ray.kill(ray.get_runtime_context().current_actor)

    def address(self) -> tuple[str, str]:
        """Returns its server's, or "", and what that has said last."""
        return self._address, self._said

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def addresses(namespace: str, name: str) -> list[str]:
    """Returns the addresses of servers that are ready now, by `ray://namespace/name`.

    Raises:
      AddressError: There are none, no cluster, or no Ray; says what to do.
    """
    if getattr(sys.modules.get("ray"), "is_initialized", bool)():
        return _find(namespace, name)
    command = [sys.executable, "-m", "envserve.ray", namespace, name]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise AddressError("Ray has been silent for 60 s (ray status)") from None
    if found.returncode:
        raise AddressError(last_line(found.stdout or found.stderr))
    return found.stdout.split()


def _find(namespace: str, name: str) -> list[str]:
    ray, word, asked, found = connected(), f"ray://{namespace}/{name}", [], []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace and actor["name"].startswith(f"{name}/"):
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                asked.append(ray.get_actor(**actor).address.remote())
    ready = ray.wait(asked, num_returns=len(asked), timeout=5)[0] if asked else []
    for answer in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # it is being started again
            found.append(str(ray.get(answer)[0]))
    if not any(found):
        text = f"none of {len(asked)} servers is ready in Ray; see its logs, or start "
        raise AddressError(f"{word}: {text}some: envserve start --on {word}")
    return sorted(filter(None, found))


def parse(word: str) -> tuple[str, str]:
    """Returns namespace and name of ray://namespace/name; raises AddressError."""
    namespace, _, name = word.removeprefix("ray://").partition("/")
    if not (word.startswith("ray://") and namespace and name):
        raise AddressError(f"expected ray://namespace/name, got {word!r:.200}")
    return namespace, name


def connected(*, log_to_driver: bool = __name__ != "__main__") -> Any:
    """Returns Ray, connected to a cluster that runs; raises AddressError."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # else a quarter of an hour
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # who waits is told
    try:
        import ray
    except ImportError:
        raise AddressError("Ray is needed here: pip install 'envserve[ray]'") from None
    try:
        if not ray.is_initialized():
            ray.init("auto", log_to_driver=log_to_driver)
    except Exception as error:  # of many kinds
        raise AddressError(f"no Ray cluster (ray start): {last_line(error)}") from None
    return ray


def last_line(error: object) -> str:
    """Returns the last line of what was said, which says most."""
    return str(error).strip().rpartition("\n")[2]


if __name__ == "__main__":
    try:
        print(*_find(*sys.argv[1:]))
    except AddressError as error:
        sys.exit(print(error) or 1)
