"""Servers and learners on a Ray cluster of three nodes, while nodes die."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.cluster_utils import Cluster

from benchmarks.support.processes import is_running, with_descendants
from envserve.client import BatchEnv, Status
from envserve.client.link.sessionless_requests import request_welcome
from envserve.errors import AddressError, ConnectError
from envserve.ray import addresses
from tests.integration.test_documents import BIN, ROOT, commands

WORD = "ray://default/envs"
ENV = "CartPole-v1"
#: Options for small learners that train until they are stopped.
SMALL = [
    *("--num-workers", "1", "--set", "num_envs=4", "--set", "minibatch_size=32"),
    *("--set", "horizon=16", "--set", "epochs=1", "--set", "jit_compile=false"),
    *("--set", "total_steps=1000000000", "--set", "checkpoint_every=64"),
    *("--set", "evaluation_episodes=2", "--set", "policy_layers=4"),
]
#: Timeout in seconds for Ray operations; Ray takes 30 s to detect a dead node.
LONG = 600.0
pytestmark = pytest.mark.timeout(1800)


class RayCluster:
    """A Ray cluster whose nodes have loopback addresses; RAY_ADDRESS is its address."""

    def __init__(self, patch: pytest.MonkeyPatch, num_nodes: int = 3) -> None:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        self._others = with_descendants(os.getpid())  # left over from other tests
        self.cluster = Cluster(shutdown_at_exit=False)
        for last in range(2, 2 + num_nodes):
            self.add_node(f"127.0.0.{last}")
        patch.setenv("RAY_ADDRESS", self.cluster.address)

    def add_node(self, ip: str) -> None:
        self.cluster.add_node(
            node_ip_address=ip,
            num_cpus=2,
            object_store_memory=80 << 20,
            include_dashboard=False,
        )

    def kill_node(self, ip: str) -> None:
        """Kill a node's raylet, which kills all of its actors."""
        (node,) = (n for n in self.cluster.worker_nodes if n.node_ip_address == ip)
        (raylet,) = node.all_processes["raylet"]
        raylet.process.kill()
        raylet.process.wait()  # while it is a zombie, actors consider it alive

    def close(self) -> None:
        ours = {*with_descendants(os.getpid())}.difference(self._others)
        self.cluster.shutdown()
        wait_until(lambda: not any(map(is_running, ours)), "Ray has ended")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    cluster = RayCluster(monkeypatch)
    yield cluster
    cluster.close()


class Started:
    """An `envserve start --on ray` process."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "envserve", "start", "--on", "ray", *options]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True
            )
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        is_ready = "envserve: ready on"
        self.ready_line = next((x for x in lines if x.startswith(is_ready)), "")

    @property
    def addresses(self) -> list[str]:
        return self.ready_line.partition(f"{WORD}: ")[2].split()

    @property
    def error(self) -> str:
        """The command's error line, without Ray's output."""
        lines = self.log.read_text().splitlines()
        (found,) = (line for line in lines if line.startswith("Error: "))
        return found

    def end(self, number: int | None = None) -> int:
        """Send a signal, if given; wait for the process and return its exit code."""
        if number is not None:
            self.process.send_signal(number)
        try:
            return self.process.wait(LONG)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


class Training(contextlib.AbstractContextManager["Training"]):
    """A `ppo train` process, which is killed when the context ends."""

    def __init__(self, run: Path, *args: str) -> None:
        self._run, self._log = run, run.with_name("train.log")
        code = "from ppo.cli.app import main; main()"
        command = [sys.executable, "-c", code, "train", *args, "--run-dir", str(run)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text()

    def rows(self) -> list[dict[str, Any]]:
        assert self.process.poll() in (None, 0), self.log()
        path = self._run / "metrics.jsonl"
        text = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def has_checkpoint(self) -> bool:
        assert self.process.poll() is None, self.log()
        return any((self._run / "checkpoints").glob("[0-9]" * 8))

    def others(self) -> dict[str, int]:
        """Return the pids of all learners except the first, by IP address."""
        found: dict[str, int] = {}
        for pid in with_descendants(os.getpid()):
            with contextlib.suppress(OSError):
                place = Path(f"/proc/{pid}")
                args = (place / "cmdline").read_bytes() + (
                    place / "environ"
                ).read_bytes()
                text = re.search(rb"--distribute.*TF_CONFIG=([^\0]*)", args, re.DOTALL)
                config = json.loads(text[1]) if text and is_running(pid) else {}
                if config and config["task"]["index"]:
                    address = config["cluster"]["worker"][config["task"]["index"]]
                    found.setdefault(address.partition(":")[0], pid)
        return found


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path, cluster: RayCluster) -> Iterator[Start]:
    """Return a function that starts servers; stop them before their nodes."""
    started: list[Started] = []

    def begin(*options: str) -> Started:
        started.append(Started(tmp_path / f"log-{len(started)}", *options))
        return started[-1]

    yield begin
    for each in started:
        each.end(signal.SIGINT)


def wait_until(is_so: Callable[[], Any], what: str) -> Any:
    give_up_at = time.monotonic() + LONG
    while not (found := is_so()):
        assert time.monotonic() < give_up_at, f"expected within {LONG:g} s: {what}"
        time.sleep(0.2)
    return found


def ip_of(address: str) -> str:
    return address.removeprefix("tcp://").partition(":")[0]


def now_ready(number: int, but: str = "") -> list[str]:
    """Wait until `number` servers are registered, none of them at address `but`."""

    def look() -> list[str]:
        try:
            found = addresses("default", "envs")
        except AddressError:
            return []
        return found if len(found) == number and but not in found else []

    return wait_until(look, f"{number} servers, none at {but}")


def test_servers_are_spread_and_a_failed_one_is_started_again(start: Start) -> None:
    started = start("--servers", "3", "--workers", "1", ENV)
    found = started.addresses
    assert sorted(map(ip_of, found)) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert [request_welcome(address, 30.0).env_names for address in found] == [
        (ENV,)
    ] * 3
    assert addresses("default", "envs") == found
    pids = server_pids()
    os.kill(pids[found[0]], signal.SIGKILL)
    assert len(now_ready(3, but=found[0])) == 3
    os.kill(pids[found[1]], signal.SIGTERM)  # requested, so Ray does not restart it
    assert len(now_ready(2, but=found[1])) == 2
    again = start("--servers", "1", "--workers", "1", ENV)  # adds a server
    assert len(now_ready(3)) == 3
    assert again.end(signal.SIGTERM) == 0
    assert len(now_ready(2)) == 2
    more = start("--scale-to", "4", "--workers", "1", ENV)
    assert len(more.addresses) == len(now_ready(4)) == 4
    assert start("--scale-to", "1").end() == 0
    assert len(now_ready(1)) == 1
    assert more.end(signal.SIGTERM) == 0
    assert len(now_ready(1)) == 1
    ours = server_pids().values()
    assert started.end(signal.SIGINT) == 0
    assert not any(map(is_running, ours))
    with pytest.raises(AddressError, match="envserve start --on ray://default/envs"):
        addresses("default", "envs")


def test_servers_of_a_node_that_ray_drains_are_restarted_elsewhere(
    start: Start, cluster: RayCluster
) -> None:
    started = start("--servers", "2", "--workers", "1", ENV)
    address = next(each for each in started.addresses if ip_of(each) != "127.0.0.2")
    (node,) = (
        each
        for each in cluster.cluster.worker_nodes
        if each.node_ip_address == ip_of(address)
    )
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
    drain = ("drain-node", "--address", cluster.cluster.address, "--node-id")
    command = [str(BIN / "ray"), *drain, node.node_id, *reason]
    subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True)
    back = now_ready(2, but=address)
    assert not any(ip_of(each) == ip_of(address) for each in back)


def server_pids() -> dict[str, int]:
    """Return the pids of the servers on Ray, by address."""
    found = {}
    for pid in with_descendants(os.getpid()):
        args = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "--bind" in args:
            found[args[args.index("--bind") + 1].removesuffix("0")] = pid
    known = addresses("default", "envs")
    return {address: found[address.rpartition(":")[0] + ":"] for address in known}


def test_servers_end_with_the_process_that_started_them(start: Start) -> None:
    started = start("--servers", "2", "--workers", "1", ENV)
    pids = [*server_pids().values()]
    assert len(pids) == 2
    assert started.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not any(map(is_running, pids)), "servers have ended")


def test_a_failed_start_prints_a_one_line_error(start: Start) -> None:
    started = start("--servers", "2", "--step-timeout", "0")
    assert started.end() == 2
    text = "--step-timeout: expected a number > 0.0; got '0'"
    assert started.error == f"Error: {text}; see envserve start --help"
    code = "from envserve.ray import EnvServers\n"
    code += "EnvServers(1, resources={'CPU': 99}, start_timeout=1)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ServerError: ray://default/envs: Get timed out" in run.stderr
    assert "1 of 1 servers have not started within" in run.stderr
    assert "each needs {'CPU': 99}; the nodes have [{'CPU': 2.0}, " in run.stderr
    assert "; see `ray status` and `ray list actors`" in run.stderr


def test_servers_use_the_key_of_their_node_and_clients_pin_it_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("keys", "make", str(tmp_path), "server", "gpu1", "--at", WORD)
    subprocess.run([sys.executable, "-m", "envserve", *args], check=True)
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "server"))
    cluster = RayCluster(monkeypatch, num_nodes=1)
    try:
        started = Started(tmp_path / "log", ENV)
        monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "gpu1"))
        with BatchEnv.connect(ENV, [WORD], 2, seed=1) as batch:
            assert batch.reset().shape == (2, 4)
        monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "unknown"))
        with pytest.raises(ConnectError):
            BatchEnv.connect(ENV, [WORD], 2, seed=1)
        assert started.end(signal.SIGTERM) == 0
    finally:
        cluster.close()


def test_a_batch_continues_when_a_node_dies(cluster: RayCluster, start: Start) -> None:
    started = start("--servers", "3", "--workers", "1", ENV)
    with BatchEnv.connect(ENV, [WORD], 6, seed=1) as batch:
        batch.reset()
        steps = iter(lambda: batch.step(np.ones(6, np.int64)), None)
        assert next(steps).valid.all()
        cluster.kill_node("127.0.0.4")
        wait_until(lambda: not next(steps).valid.all(), "rows are lost")
        seen = wait_until(
            lambda: (s := next(steps)).valid.all() and s, "all rows are back"
        )
        assert (seen.status == Status.OK).all()
        back = now_ready(3, but=next(a for a in started.addresses if ".4:" in a))
        assert not any(ip_of(address) == "127.0.0.4" for address in back)
    assert started.end(signal.SIGTERM) == 0


def test_training_continues_and_learns(
    cluster: RayCluster, start: Start, tmp_path: Path
) -> None:
    started = start("--servers", "3", "--workers", "1", ENV)
    run = tmp_path / "run"
    args = ["cartpole", "--connect", WORD, "--seed", "1"]
    args += ["--set", "total_steps=100000000", "--set", "num_envs=6"]
    with Training(run, *args) as training:
        rows = training.rows
        wait_until(lambda: len(rows()) > 3, "the training has begun")
        cluster.kill_node("127.0.0.3")
        wait_until(lambda: rows()[-1]["lost_episodes"], "it has lost episodes")
        wait_until(lambda: rows()[-1]["valid_fraction"] == 1.0, "all rows are back")
        wait_until(lambda: rows()[-1]["mean_return"] > 60, "it learns")
        training.process.send_signal(signal.SIGTERM)
        assert training.process.wait(LONG) == 0
    assert started.end(signal.SIGTERM) == 0


def test_the_documented_commands_train_with_one_learner_and_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ours = re.compile(r"ray |.* --on ray |ppo .*ray://").match
    found = filter(is_ours, commands(ROOT / "docs" / "cluster.md"))
    head, servers, *trainings = map(shlex.split, found)
    head += ["--block", "--port=0", "--num-cpus=4"]
    few = ["total_steps=4096", "evaluation_episodes=2", "jit_compile=false"]
    few = [word for each in few for word in ("--set", each)]
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    with contextlib.ExitStack() as stack:
        folder = tempfile.TemporaryDirectory()  # short, because it contains sockets
        monkeypatch.setenv("RAY_TMPDIR", stack.enter_context(folder))
        log = stack.enter_context((tmp_path / "ray").open("w+"))
        node = stack.enter_context(
            subprocess.Popen([BIN / "ray", *head[1:]], stdout=log)
        )
        stack.callback(node.terminate)
        wait_until(lambda: "Ray runtime started" in Path(log.name).read_text(), "Ray")
        started = Started(tmp_path / "log", *servers[4:])
        stack.callback(started.end, signal.SIGINT)
        for args in trainings:
            with Training(tmp_path / f"run-{len(args)}", *args[2:], *few) as training:
                assert training.process.wait(LONG) == 0, training.log()
        assert started.end(signal.SIGINT) == 0
        log_text = started.log.read_text()
    # Each learner has a lease on each of the two servers, in both training runs.
    assert log_text.count("8 CartPole-v1, ended after 2,048 env steps") == 2
    assert log_text.count("4 CartPole-v1, ended after 1,024 env steps") == 4


def test_learners_continue_when_one_is_killed_and_when_its_node_dies(
    cluster: RayCluster, tmp_path: Path
) -> None:
    args = ("CartPole-v1", "--on", "ray", "--learners", "2", *SMALL)
    with Training(tmp_path / "run", *args) as training:

        def wait_until_restarted(times: int) -> None:
            """Wait until the learners were restarted `times` times and continue."""
            text = "Restarting all learners: "
            wait_until(lambda: training.log().count(text) == times, f"{times} {text}")
            rows = len(training.rows())
            wait_until(lambda: len(training.rows()) > rows, "it learns")

        wait_until(training.has_checkpoint, "a checkpoint")
        assert training.rows()[0]["steps"] == 64  # the sum over both learners
        (pid,) = training.others().values()
        os.kill(pid, signal.SIGKILL)
        wait_until_restarted(1)
        (ip,) = training.others()
        cluster.kill_node(ip)
        wait_until_restarted(2)
        wait_until(lambda: [*training.others()] not in ([], [ip]), "it is elsewhere")
        training.process.send_signal(signal.SIGTERM)
        assert training.process.wait(LONG) == 0
        wait_until(lambda: not training.others(), "the other learner has ended")
    iterations = [row["iteration"] for row in training.rows()]
    assert iterations == list(range(1, len(iterations) + 1))
    again = training.log().rpartition("Resume with: ppo train ")[2].splitlines()[0]
    args = (*shlex.split(again), "--set", "total_steps=64")
    assert args[1:5] == ("--on", "ray", "--learners", "2")
    with Training(tmp_path / "run", *args) as training:
        assert training.process.wait(LONG) == 0
        assert "Evaluation after " in training.log()


def test_the_error_about_missing_capacity_lists_the_free_resources(
    cluster: RayCluster, tmp_path: Path
) -> None:
    args = ("CartPole-v1", "--on", "ray", "--learners", "2", "--resources")
    with Training(tmp_path / "run", *args, '{"CPU": 2, "licence": 1}') as training:
        assert training.process.wait(LONG) == 1
    (error,) = (x for x in training.log().splitlines() if x.startswith("Error: "))
    assert error.startswith(
        "Error: --learners 2: each learner needs {'CPU': 2.0, 'licence': 1.0"
    )
    assert "the cluster has only {'CPU': 6.0, 'licence': 0} free" in error
    assert not (tmp_path / "run").exists()
