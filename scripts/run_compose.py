"""Test docker-compose.yml without Docker: run its commands in network namespaces.

    python scripts/run_compose.py --servers 4

Each container is a network namespace with the container's name, and its command is a
process in the namespace. The script trains, checks the page and the metrics, kills a
server, and restarts it. Exits with 1 if anything does not recover. Linux only; requires
root and iproute2.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.network_hosts import Hosts  # noqa: E402

BIN = Path(sysconfig.get_path("scripts"))
FETCH = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())
"""


class Cluster:
    """The services of docker-compose.yml, each on one host; `sim` runs on several.

    Attributes:
      servers: Names of the hosts that run `sim`.
      processes: Maps names of hosts to their running processes.
    """

    def __init__(self, num_servers: int, folder: Path) -> None:
        text = (ROOT / "docker-compose.yml").read_text()
        self.services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
        self.servers = [f"sim-{number}" for number in range(1, num_servers + 1)]
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        others = ("keys", "trainer", "page", "prometheus")
        aliases = dict.fromkeys(self.servers, "sim")
        self.hosts = Hosts([*self.servers, *others], aliases)

    def command(self, host: str, words: list[str]) -> list[str]:
        """Return the command line that runs `words` on a host.

        Paths in volumes are replaced with paths in `self.folder`.
        """
        program, *rest = words
        arguments = [word.replace("/keys", f"{self.folder}/keys") for word in rest]
        return self.hosts.command(host, str(BIN / program), *arguments)

    def environment(self, service: str) -> dict[str, str]:
        """Return a service's environment variables.

        Paths in volumes are replaced with paths in `self.folder`.
        """
        variables = self.services[service].get("environment", {})
        home = variables.get("ENVSERVE_HOME", "/nowhere")
        return os.environ | {"ENVSERVE_HOME": f"{self.folder}{home}"}

    def start(self, service: str, host: str = "", *more: str) -> None:
        """Start the command of a service; its output is appended to a log file."""
        host = host or service
        program = "ppo" if service == "trainer" else "envserve"
        words = [program, *self.services[service]["command"], *more]
        with (self.folder / f"{host}.log").open("a") as log:
            self.processes[host] = subprocess.Popen(
                self.command(host, words),
                env=self.environment(service),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                text=True,
            )

    def run(self, service: str, host: str, words: list[str]) -> str:
        """Return the output of a command on a host, or "" if it failed."""
        command, env = self.command(host, words), self.environment(service)
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    def fetch(self, host: str, url: str) -> str:
        """Fetch a URL from a host; return the contents, or "" on failure."""
        return self.run("sim", host, ["python", "-P", "-c", FETCH, url])

    def log(self, host: str) -> str:
        return (self.folder / f"{host}.log").read_text()

    def kill_host(self, host: str) -> None:
        """Kill the process of a host with SIGKILL, so that it cannot send a message."""
        process = self.processes.pop(host)
        process.kill()
        process.wait()

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(timeout=120)


def wait_for(name: str, condition: Callable[[], Any], seconds: float = 180) -> Any:
    """Wait for a condition, print how long that took, and return its value.

    Raises:
      TimeoutError: The condition did not become true in time.
    """
    started = time.monotonic()
    while not (found := condition()):
        if time.monotonic() > started + seconds:
            raise TimeoutError(f"expected within {seconds:g} s: {name}")
        time.sleep(0.1)
    print(f"{time.monotonic() - started:5.1f} s  {name}", flush=True)
    return found


@contextmanager
def print_logs_on_failure(folder: Path) -> Iterator[None]:
    """On failure, print the end of each log and exit with 1."""
    try:
        yield
    except (TimeoutError, ChildProcessError) as error:
        for log in sorted(folder.glob("*.log")):
            print(f"-- {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def health_command() -> list[str]:
    """Return the command of the image's health check."""
    (words,) = set(
        re.findall(r"^ +CMD (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.M)
    )
    found: list[str] = json.loads(words)
    return found


def rows_of(run: Path) -> list[dict[str, Any]]:
    metrics = run / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    lines, _, _ = text.rpartition("\n")  # the last line may be incomplete
    return [json.loads(line) for line in lines.splitlines()]


def check_recovery(cluster: Cluster) -> None:
    """Train, and check that everything recovers from the loss of a host."""
    run, services = cluster.folder / "run", cluster.services
    lost = cluster.servers[-1]

    def is_healthy(server: str) -> bool:
        return bool(cluster.run("sim", server, health_command()))

    cluster.run("keys", "keys", ["envserve", *services["keys"]["command"]])
    for server in cluster.servers:
        cluster.start("sim", server)
    for server in cluster.servers:
        wait_for(f"{server} is healthy", partial(is_healthy, server))
    cluster.start("page")
    words = ("--set", "total_steps=100000000", "--run-dir", str(run))
    cluster.start("trainer", "", *words)

    def trains_on(num_rows: int) -> bool:
        if cluster.processes["trainer"].poll() not in (None, 0):
            raise ChildProcessError(cluster.log("trainer")[-2000:])
        return len(rows_of(run)) >= num_rows

    def has_moved(before: int) -> bool:
        """Return whether metrics after row `before` show lost steps and a recovery."""
        fractions = [row["valid_fraction"] for row in rows_of(run)[before:]]
        return min(fractions, default=1.0) < 1.0 == fractions[-1]

    def is_watched() -> bool:
        url = re.search(r"http://\S+", cluster.log("page"))
        return url is not None and "<html" in cluster.fetch("page", url[0])

    def is_measured(host: str, name: str) -> bool:
        service = "trainer" if host == "trainer" else "sim"
        command = services[service]["command"]
        port = command[command.index("--metrics-port") + 1]
        return name in cluster.fetch("prometheus", f"http://{host}:{port}/metrics")

    wait_for("the trainer trains", lambda: trains_on(3))
    wait_for("the page works", is_watched)
    for host in cluster.servers:
        wait_for(f"{host} has metrics", partial(is_measured, host, "envserve_"))
    wait_for("the trainer has metrics", lambda: is_measured("trainer", "ppo_"))
    before = len(rows_of(run))
    cluster.kill_host(lost)
    wait_for(f"training continues without {lost}", lambda: trains_on(before + 3))
    wait_for(f"the rows of {lost} have moved", lambda: has_moved(before))
    wait_for("the page still works", is_watched)
    wait_for("metrics still work", lambda: is_measured(cluster.servers[0], "envserve_"))
    cluster.start("sim", lost)
    wait_for(f"{lost} is healthy again", partial(is_healthy, lost))
    trainer = cluster.processes.pop("trainer")
    trainer.send_signal(signal.SIGTERM)
    wait_for("the training is saved", lambda: trainer.poll() is not None)
    if trainer.returncode:
        raise ChildProcessError(cluster.log("trainer")[-2000:])
    last = rows_of(run)[-1]
    print(f"{last['steps']:,} steps, mean return {last['mean_return']:.1f}")


def main(
    servers: Annotated[
        int, typer.Option(min=2, help="Number of hosts that run `sim`.")
    ] = 4,
) -> None:
    """Test docker-compose.yml in network namespaces."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = Cluster(servers, folder)
        stack.enter_context(cluster.hosts.created())
        stack.callback(cluster.close)
        with print_logs_on_failure(folder):
            check_recovery(cluster)


if __name__ == "__main__":
    typer.run(main)
