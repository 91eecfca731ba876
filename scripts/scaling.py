"""Measure a trainer's costs per batch step on many servers, for docs/scaling.md.

    python scripts/scaling.py fit          1 to 16 simulated servers, on loopback
    python scripts/scaling.py check        8 to 512 simulated servers, and real servers
    python scripts/scaling.py namespaces   64 real servers, each a host; Linux, root
    python scripts/scaling.py attach       replace one server with another, 100 times
    python scripts/scaling.py document     write the tables of the page

Each command except `document` replaces its part of docs/scaling.json, and takes at most
four minutes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import typer

ROOT = Path(__file__).resolve().parent.parent
SELF = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
sys.path.insert(0, str(ROOT))

from benchmarks.cases import envs  # noqa: E402
from benchmarks.scaling.document import write_document  # noqa: E402
from benchmarks.scaling.measure import Point, measure, measure_batch  # noqa: E402
from benchmarks.support.machine import describe_machine, machine_facts  # noqa: E402
from benchmarks.support.processes import temporary_keys  # noqa: E402
from envserve.client import BatchEnv  # noqa: E402
from envserve.python_process import main_command, python_command  # noqa: E402
from tests.chaos.network_faults import NetworkFaults  # noqa: E402
from tests.chaos.proxy import Proxy  # noqa: E402
from tests.envserve.server_process import ServerProcess  # noqa: E402
from tests.network_hosts import Hosts  # noqa: E402

NUMBERS = ROOT / "docs" / "scaling.json"
PAGE = NUMBERS.with_suffix(".md")
app = typer.Typer(help=__doc__)

#: Envs per server, and size of an observation in bytes.
SHAPES = [(1, 16), (16, 16), (64, 16), (16, 1024), (16, 28224)]
#: Options of the servers in `namespaces` and `attach`: one worker, whose envs sleep.
SLEEPING = (
    *("--workers", "1", "--envs-per-worker", "16", "--env", "envserve/Sleep-v0"),
    *("--allow-kwarg", "step_seconds:any", "--drain-grace", "0"),
)


def save_part(part: str, results: Any) -> None:
    """Replace one part of the results in docs/scaling.json."""
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    numbers |= {"machine": describe_machine(machine_facts()), part: results}
    lines = (f"{json.dumps(k)}: {json.dumps(value)}" for k, value in numbers.items())
    NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def measure_all(points: Sequence[Point], turns: int) -> list[Point]:
    """Measure the points `turns` times, in alternating order; return the medians."""
    results: dict[Point, list[Point]] = {point: [] for point in points}
    for turn in range(turns):
        for point in points[:: 1 if turn % 2 == 0 else -1]:
            results[point].append(measure(point, 0.5))
            print(results[point][-1], flush=True)
    costs = {k: np.median([p[8:] for p in ps], axis=0) for k, ps in results.items()}
    return [Point(*k[:8], *c.round(1).tolist()) for k, c in costs.items()]


@app.command()
def fit(keys: bool = False, turns: int = 3) -> None:
    """Measure 1 to 16 simulated servers, with or without keys."""
    with temporary_keys():
        measured = measure_all(
            [
                Point(servers, count, size, keys)
                for servers in (1, 2, 4, 8, 16)
                for count, size in SHAPES
            ],
            turns,
        )
    save_part("fit with keys" if keys else "fit", measured)


@app.command()
def check() -> None:
    """Measure 8 to 512 servers, splits, slow envs, and real servers."""
    points = [
        Point(1, 1024, 16),  # one server with as many rows as 64 servers of 16 envs
        *(Point(*x, 16) for x in ((8, 16), (256, 16), (512, 32))),
        *(Point(64, 16, 16, k, splits) for k in (False, True) for splits in (1, 2)),
        *(Point(64, *x, k) for x in ((1, 16), (16, 1024)) for k in (False, True)),
        Point(64, 4, 28224),
        *(Point(64, 16, 16, env_us=us) for us in (10.0, 100.0, 1000.0, 10000.0)),
        *(
            Point(4, 16, size, k, servers_are="real")
            for size in (16, 28224)
            for k in (False, True)
        ),
    ]
    with temporary_keys():
        save_part("check", measure_all(points, 2))


@app.command()
def namespaces(servers: int = 64, delays: str = "0,0.2,1,20") -> None:
    """Measure real servers, each in a namespace, over a network with delays."""
    sims = [f"sim-{number}" for number in range(servers)]
    hosts = Hosts(["trainer", *sims])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make = ("keys", "make", folder, "server", "trainer", "--at", "tcp://*:5555")
        command = main_command("envserve.__main__", *map(str, make))
        subprocess.run(command, check=True, stdout=sys.stderr)
        # The trainer connects to a relay on loopback, for which only the key folder of
        # the servers has keys.
        home = {"ENVSERVE_HOME": str(folder / "server")}
        stack.enter_context(hosts.created())
        processes = []
        for name in sims:
            (folder / name).mkdir()
            processes.append(
                stack.enter_context(
                    ServerProcess(
                        folder / name,
                        *SLEEPING,
                        bind=("tcp://0.0.0.0:5555",),
                        prefix=hosts.command(name),
                        imports=(envs.MODULE,),
                        environment=home,
                        waits_until_ready=False,
                    )
                )
            )
        for process in processes:
            process.wait_until_ready()
        measured = []
        for delay in delays.split(","):
            for env_us in (0.0, 1000.0, 10000.0):
                point = Point(servers, 16, 16, True, 1, env_us, float(delay), "real")
                targets = [f"tcp://{hosts.addresses[name]}:5555" for name in sims]
                command = python_command(SELF, "measure-running", json.dumps(point))
                finished = subprocess.run(
                    hosts.command("trainer", *command, *targets),
                    env=os.environ | home,
                    stdout=subprocess.PIPE,
                    check=True,
                )
                measured.append(Point(*json.loads(finished.stdout)))
                print(measured[-1], flush=True)
    save_part("namespaces", measured)


@app.command(hidden=True)
def measure_running(point_json: str, targets: list[str]) -> None:
    """Connect to running servers as a trainer, and print the measured point as JSON."""
    point = Point(*json.loads(point_json))
    context = multiprocessing.get_context("spawn")
    connection, child_end = context.Pipe()
    relays = context.Process(target=relay, args=(child_end, targets, point.delay_ms))
    relays.start()
    try:
        with BatchEnv.connect(
            "envserve/Sleep-v0",
            connection.recv(),
            point.num_envs,
            seed=0,
            connect_timeout=60.0,
            env_kwargs={"step_seconds": point.env_us / 1e6 / point.envs},
        ) as batch:
            batch.reset()
            measured = measure_batch(point, batch, 2.0, "eth0")
    finally:
        relays.kill()
        relays.join()
    print(json.dumps(measured))


def relay(connection: Connection, targets: Sequence[str], delay_ms: float) -> None:
    """Forward connections to the targets with a round-trip delay.

    Send the addresses to connect to over `connection`, and then never return.
    """
    delay = NetworkFaults(latency_seconds=delay_ms / 2000)
    proxies = [Proxy(target, to_server=delay, to_client=delay) for target in targets]
    connection.send([proxy.address for proxy in proxies])
    signal.pause()


@app.command()
def attach(changes: int = 100, servers: int = 4) -> None:
    """Replace one server after another, and measure the duration of each step."""
    leaving: list[float] = []
    attaching: list[float] = []
    calm: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(temporary_keys())
        address_file = folder / "servers"
        running: list[ServerProcess] = []

        def start() -> list[ServerProcess]:
            """Start one replacement per server of the batch, all at the same time."""
            started = []
            for _ in range(servers):
                home = Path(tempfile.mkdtemp(dir=folder))
                server = ServerProcess(
                    home, *SLEEPING, imports=(envs.MODULE,), waits_until_ready=False
                )
                started.append(stack.enter_context(server))
            for server in started:
                server.wait_until_ready()
            return started

        def write_addresses() -> None:
            address_file.write_text("\n".join(server.address for server in running))

        running += start()
        write_addresses()
        kwargs = {"step_seconds": 0.0001}
        batch = stack.enter_context(
            BatchEnv.connect(
                "envserve/Sleep-v0",
                [f"file://{address_file}"],
                16 * servers,
                seed=0,
                env_kwargs=kwargs,
                server_lost_after=600.0,
            )
        )
        batch.reset()
        actions = np.zeros(batch.num_envs, np.int64)

        def step_until(is_over: Callable[[Any], bool], durations: list[float]) -> None:
            while True:
                started = time.perf_counter()
                result = batch.step(actions)
                durations.append(1000 * (time.perf_counter() - started))
                if is_over(result):
                    return

        replacements: list[ServerProcess] = []
        for change in range(changes):
            replacements = replacements or start()
            num_calm = len(calm) + 20
            step_until(lambda _: len(calm) >= num_calm, calm)  # noqa: B023
            leaving_server = running.pop(change % servers)
            leaving_server.signal(signal.SIGKILL if change % 2 else signal.SIGTERM)
            step_until(lambda result: not result.valid.all(), leaving)
            leaving_server.wait()
            running.append(replacements.pop())
            write_addresses()
            step_until(lambda result: result.valid.all(), attaching)
    parts = {"calm": calm, "leaving": leaving, "attaching": attaching}
    save_part(
        "attach",
        {"changes": changes, "servers": servers}
        | {
            name: {
                "steps": len(durations),
                **{f"p{p}": float(np.percentile(durations, p)) for p in (50, 99, 100)},
            }
            for name, durations in parts.items()
        },
    )


@app.command()
def document() -> None:
    """Write the tables of the page from docs/scaling.json."""
    write_document(PAGE, json.loads(NUMBERS.read_text()))


if __name__ == "__main__":
    app()
