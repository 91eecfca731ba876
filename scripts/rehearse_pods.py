"""Rehearse deploy/kubernetes: its very pods, on hosts of our own network.

    python scripts/rehearse_pods.py

Every pod is a network namespace, every container a process in a root of its own, with
the commands, probes, volumes and users of the manifests (tests/pods.py says what that
cannot show). The trainer waits for servers and trains; one is killed and comes back at
another address, the other one is evicted; the trainer is evicted, goes on with two of
four servers, takes the others in, and goes on while one of them is cut off; it is
killed, and goes on until its job is complete. Every valid row has to follow from the
one before by CartPole's own rules. Exits with 1 if anything is not so. For Linux; needs
root and iproute2.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.cluster import rows_of, telling, wait_for  # noqa: E402
from tests.network_hosts import Hosts  # noqa: E402
from tests.pods import SEARCH, Names, Pod, make_keys, pod_spec, resource  # noqa: E402

SERVERS = pod_spec("StatefulSet", "envs")
TRAINER = pod_spec("Job", "trainer")
#: Seconds that TensorFlow's start and some iterations may take.
PATIENCE = 240
#: A run that goes on until it is stopped.
FEW = ("--set", "evaluation_episodes=5", "--set", "callbacks=runs/rows.py:check")
ENDLESS = ("--set", "total_steps=100000000", "--set", "checkpoint_seconds=1", *FEW)
#: Named by the trainer's callbacks: a wrong row ends it.
CHECK = """
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


def check(run, metrics, rollout):
    env, seen = CartPoleEnv(), rollout.observation
    for step, row in zip(*np.nonzero(rollout.valid)):
        env.reset()
        env.state = seen[step, row].astype(float)
        expected, *_ = env.step(rollout.action[step, row])
        is_end = rollout.done[step, row]
        got = (rollout.final_observation[step] if is_end else seen[step + 1])[row]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
"""


class Cluster:
    """What the controllers of a cluster would do, step by step.

    Attributes:
      servers: The pods of the StatefulSet, by name.
      trainer: The pod of the Job.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.names = Names(hosts, folder)
        self.servers: dict[str, Pod] = {}
        self.run = folder / "claims" / "runs" / "cartpole"
        self.trainer = self.new_trainer()
        (self.run.parent / "rows.py").write_text(CHECK)

    def begin_server(self, name: str, host: str) -> Pod:
        """Makes a pod and starts it; nobody finds it yet."""
        pod = Pod(name, SERVERS, self.hosts, host, self.folder)
        self.servers[name] = pod
        wait_for(f"{name} has keys", pod.is_initialised)
        pod.start()
        return pod

    def await_servers(self) -> None:
        """Waits for all that have begun to be ready; then the name stands for them."""
        for name, pod in self.servers.items():
            is_ready = partial(pod.passes, "startupProbe")
            wait_for(f"{name} at {pod.address} is ready", is_ready)
        self.names.publish(*self.servers.values())

    def lose_server(self, name: str) -> Pod:
        """Takes a pod out of the name."""
        pod = self.servers.pop(name)
        self.names.publish(*self.servers.values())
        return pod

    def new_trainer(self) -> Pod:
        """Makes the next pod of the job, with the volume of the one before."""
        return Pod("trainer", TRAINER, self.hosts, "gpu", self.folder)

    def start_trainer(self, *more: str) -> None:
        """Waits for its init containers, and starts it."""
        pod = self.trainer
        wait_for("the trainer has keys and servers", pod.is_initialised)
        pod.start(*more)

    def trains_on(self, num_rows: int, is_whole: bool | None = None) -> bool:
        """Whether there are so many rows, the last one of valid steps only or not."""
        if self.trainer.process.poll() is not None:
            raise ChildProcessError(self.trainer.log()[-3000:])
        rows = rows_of(self.run)
        if len(rows) < num_rows:
            return False
        return is_whole is None or (rows[-1]["valid_fraction"] == 1.0) == is_whole

    def goes_on(self, what: str, is_whole: bool | None = None) -> None:
        """Waits for more rows than there are now."""
        before = len(rows_of(self.run))
        wait_for(what, lambda: self.trains_on(before + 3, is_whole), PATIENCE)

    def close(self) -> None:
        for pod in (self.trainer, *self.servers.values()):
            pod.kill()
        self.names.close()


def end(pod: Pod, code: int, seconds: float) -> None:
    """Waits for a pod's end, with an exit code."""
    wait_for(f"{pod.name} ends", lambda: pod.process.poll() is not None, seconds)
    if pod.process.returncode != code:
        raise ChildProcessError(
            f"{pod.name}: expected exit code {code}, got {pod.process.returncode}"
        )


def evict(pod: Pod, code: int) -> None:
    """Has a pod end within its grace period."""
    pod.terminate()
    end(pod, code, pod.spec["terminationGracePeriodSeconds"])


def action_of(code: int) -> str:
    """Returns what the job does about a trainer's exit code."""
    policy = resource("Job", "trainer")["spec"]["podFailurePolicy"]
    rules = [rule for rule in policy["rules"] if "onExitCodes" in rule]
    actions = (r["action"] for r in rules if code in r["onExitCodes"]["values"])
    return next(actions, "Count")


def rehearse_servers(cluster: Cluster) -> None:
    cluster.trainer.is_initialised()  # begins it
    for name, host in (("envs-0", "a"), ("envs-1", "b")):
        cluster.begin_server(name, host)
    if cluster.trainer.is_initialised():
        raise ChildProcessError("expected the trainer to wait for servers; it does not")
    cluster.await_servers()
    cluster.start_trainer(*ENDLESS)
    wait_for("the trainer trains", lambda: cluster.trains_on(3, True), PATIENCE)
    in_use = cluster.servers["envs-0"]
    wait_for("a server in use is live", lambda: in_use.passes("livenessProbe"))

    # No pod comes back where it was.
    cluster.lose_server("envs-1").kill()
    cluster.goes_on("training goes on without envs-1", True)
    moved = cluster.begin_server("envs-1", "c")
    cluster.await_servers()
    evict(cluster.lose_server("envs-0"), 0)
    cluster.goes_on(f"all envs are on envs-1 at {moved.address}", True)
    cluster.begin_server("envs-0", "b")
    cluster.await_servers()


def rehearse_trainer(cluster: Cluster) -> None:
    evict(cluster.trainer, 3)
    if action_of(3) != "Ignore":
        raise ChildProcessError("expected the job to ignore a trainer that is stopped")
    cluster.trainer = cluster.new_trainer()
    cluster.start_trainer(*ENDLESS, "--min-servers", "2", "--set", "num_servers=4")
    cluster.goes_on("the next trainer goes on with two servers of four", False)
    for name, host in (("envs-2", "a"), ("envs-3", "d")):
        cluster.begin_server(name, host)
    cluster.await_servers()
    cluster.goes_on("the others are taken in", True)
    cluster.hosts.pull_cable("d")
    cluster.goes_on("training goes on while envs-3 is cut off", False)
    cluster.hosts.plug_cable("d")
    cluster.goes_on("envs-3 is back", True)
    cluster.trainer.kill()
    steps = rows_of(cluster.run)[-1]["steps"]
    cluster.trainer = cluster.new_trainer()
    cluster.start_trainer("--set", f"total_steps={steps + 10_000}", *FEW)
    end(cluster.trainer, 0, PATIENCE)
    seen = [row["steps"] for row in rows_of(cluster.run)]
    if seen != sorted(set(seen)) or seen[-1] <= steps:
        raise ChildProcessError(f"expected each step once, got {seen}")
    evaluation = json.loads((cluster.run / "evaluation.json").read_text())
    print(f"{seen[-1]:,} steps, mean return {evaluation['mean_return']:.1f}")


def main() -> None:
    """Rehearse deploy/kubernetes in network namespaces."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = Hosts(["names", "a", "b", "c", "d", "gpu"], search=SEARCH)
        stack.callback(hosts.remove)
        hosts.create()
        make_keys(folder)
        cluster = Cluster(hosts, folder)
        stack.callback(cluster.close)
        with telling(folder):
            rehearse_servers(cluster)
            rehearse_trainer(cluster)


if __name__ == "__main__":
    typer.run(main)
