"""Test deploy/kubernetes without a cluster: run its pods in network namespaces.

    python scripts/run_pods.py

Each pod is a network namespace, and each container is a process with its own root
directory and with the commands, probes, volumes and users of the manifests.
tests/pods.py lists the parts of the manifests that the script does not test.

The trainer waits for servers and trains. One server is killed and restarts at another
address; the other server is evicted. The trainer is evicted, resumes with two of four
servers, uses the other two when they start, and continues while one of them is
disconnected. Then the trainer is killed, and resumes until its job is complete. Every
valid row must follow from the previous row by CartPole's dynamics. Exits with 1 if a
check fails. Linux only; requires root and iproute2.
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

from scripts.run_compose import print_logs_on_failure, rows_of, wait_for  # noqa: E402
from tests.network_hosts import Hosts  # noqa: E402
from tests.pods import SEARCH, Names, Pod, make_keys, pod_spec, resource  # noqa: E402

SERVERS = pod_spec("Deployment", "envs")
TRAINER = pod_spec("Job", "trainer")
#: Timeout for starting TensorFlow and running some iterations.
TIMEOUT_SECONDS = 240
#: Options of all runs, and those of a run that does not end by itself.
COMMON = ("--set", "evaluation_episodes=5", "--set", "callbacks=runs/rows.py:check")
ENDLESS = ("--set", "total_steps=100000000", "--set", "checkpoint_seconds=1", *COMMON)
#: The trainer's callback, which aborts training at a wrong row.
CHECK = """
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


def check(run, metrics, rollout):
    env, observation = CartPoleEnv(), rollout.observation
    for step, row in zip(*np.nonzero(rollout.valid)):
        env.reset()
        env.state = observation[step, row].astype(float)
        expected, *_ = env.step(rollout.action[step, row])
        is_done = rollout.done[step, row]
        rows = rollout.final_observation[step] if is_done else observation[step + 1]
        np.testing.assert_allclose(rows[row], expected, rtol=1e-5, atol=1e-5)
"""


class Cluster:
    """Starts and removes pods, as the controllers of a cluster do.

    Attributes:
      servers: Maps names to the pods of the Deployment.
      trainer: The pod of the Job.
    """

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.names = Names(hosts, folder)
        self.servers: dict[str, Pod] = {}
        self.run = folder / "claims" / "runs" / "cartpole"
        self.trainer = self.new_trainer()
        (self.run.parent / "rows.py").write_text(CHECK)

    def start_server(self, name: str, host: str) -> Pod:
        """Create and start a pod, without publishing its address."""
        pod = Pod(name, SERVERS, self.hosts, host, self.folder)
        self.servers[name] = pod
        wait_for(f"{name} has keys", pod.is_initialised)
        pod.start()
        return pod

    def publish_servers(self) -> None:
        """Wait until all started pods are ready, and publish their addresses."""
        for name, pod in self.servers.items():
            is_ready = partial(pod.passes, "startupProbe")
            wait_for(f"{name} at {pod.address} is ready", is_ready)
        self.names.publish(*self.servers.values())

    def remove_server(self, name: str) -> Pod:
        """Remove a pod, and remove its address from the name of the service."""
        pod = self.servers.pop(name)
        self.names.publish(*self.servers.values())
        return pod

    def new_trainer(self) -> Pod:
        """Create the job's next pod, with the volume of the previous one."""
        return Pod("trainer", TRAINER, self.hosts, "gpu", self.folder)

    def start_trainer(self, *more: str) -> None:
        """Wait for the init containers of the trainer, and start the trainer."""
        pod = self.trainer
        wait_for("the trainer has keys and servers", pod.is_initialised)
        pod.start(*more)

    def has_rows(self, num_rows: int) -> bool:
        """Return whether there are enough rows, and all steps of the last are valid."""
        if self.trainer.process.poll() is not None:
            log = self.trainer.log()[-3000:]
            raise ChildProcessError(
                f"expected the trainer to run; it has exited:\n{log}"
            )
        rows = rows_of(self.run)
        return len(rows) >= num_rows and rows[-1]["valid_fraction"] == 1.0

    def wait_for_training(self, name: str) -> None:
        """Wait for three more rows of metrics, the last without invalid steps."""
        before = len(rows_of(self.run))
        wait_for(name, lambda: self.has_rows(before + 3), TIMEOUT_SECONDS)

    def num_leases(self, *names: str) -> int:
        """Return the number of leases that servers have granted to the trainer.

        `names` selects the servers; by default, all servers count.
        """
        pods = [self.servers[name] for name in names or self.servers]
        return sum(pod.log().count("granted to trainer") for pod in pods)

    def wait_for_leases(self, name: str, num_leases: int = 1) -> None:
        """Wait until a server has granted enough leases to the trainer."""
        wait_for(
            f"{name} is in use",
            lambda: self.num_leases(name) >= num_leases,
            TIMEOUT_SECONDS,
        )

    def close(self) -> None:
        for pod in (self.trainer, *self.servers.values()):
            pod.kill()
        self.names.close()


def expect_exit(pod: Pod, code: int, seconds: float) -> None:
    """Wait until a pod has exited, and check its exit code."""
    wait_for(f"{pod.name} ends", lambda: pod.process.poll() is not None, seconds)
    if pod.process.returncode != code:
        raise ChildProcessError(
            f"{pod.name}: expected exit code {code}, got {pod.process.returncode}"
        )


def evict(pod: Pod, code: int) -> None:
    """Terminate a pod; it must exit with `code` within its grace period."""
    pod.terminate()
    expect_exit(pod, code, pod.spec["terminationGracePeriodSeconds"])


def action_of(code: int) -> str:
    """Return the action of the job's failure policy for an exit code of the trainer."""
    policy = resource("Job", "trainer")["spec"]["podFailurePolicy"]
    rules = [rule for rule in policy["rules"] if "onExitCodes" in rule]
    actions = (r["action"] for r in rules if code in r["onExitCodes"]["values"])
    return next(actions, "Count")


def check_servers(cluster: Cluster) -> None:
    """Replace servers while the trainer trains."""
    cluster.trainer.is_initialised()  # also starts the init containers
    for name, host in (("envs-0", "a"), ("envs-1", "b")):
        cluster.start_server(name, host)
    if cluster.trainer.is_initialised():
        raise ChildProcessError(
            "expected the trainer to wait for servers, but it started"
        )
    cluster.publish_servers()
    cluster.start_trainer(*ENDLESS)
    wait_for("the trainer trains", lambda: cluster.has_rows(3), TIMEOUT_SECONDS)
    in_use = cluster.servers["envs-0"]
    wait_for("a server in use is live", lambda: in_use.passes("livenessProbe"))

    # A replaced pod gets another address.
    cluster.remove_server("envs-1").kill()
    cluster.wait_for_training("training continues without envs-1")
    moved = cluster.start_server("envs-1", "c")
    cluster.publish_servers()
    evict(cluster.remove_server("envs-0"), 0)
    cluster.wait_for_training(f"all envs are on envs-1 at {moved.address}")
    cluster.start_server("envs-0", "b")
    cluster.publish_servers()


def check_trainer(cluster: Cluster) -> None:
    """Evict and kill the trainer, and resume its run."""
    evict(cluster.trainer, 3)
    if action_of(3) != "Ignore":
        raise ChildProcessError(
            "expected the job to ignore the exit code of an evicted trainer"
        )
    cluster.trainer = cluster.new_trainer()
    cluster.start_trainer(*ENDLESS, "--min-servers", "2", "--set", "num_servers=4")
    cluster.wait_for_training("two of four servers have the trainer's envs")
    for name, host in (("envs-2", "a"), ("envs-3", "d")):
        cluster.start_server(name, host)
    cluster.publish_servers()
    cluster.wait_for_leases("envs-2")
    cluster.wait_for_leases("envs-3")
    before = cluster.num_leases()
    cluster.hosts.pull_cable("d")
    wait_for(
        "another server has the envs of envs-3",
        lambda: cluster.num_leases() > before,
        TIMEOUT_SECONDS,
    )
    cluster.wait_for_training("training continues without envs-3")
    cluster.hosts.plug_cable("d")
    cluster.wait_for_leases("envs-3", 2)
    cluster.trainer.kill()
    steps = rows_of(cluster.run)[-1]["steps"]
    cluster.trainer = cluster.new_trainer()
    cluster.start_trainer("--set", f"total_steps={steps + 10_000}", *COMMON)
    expect_exit(cluster.trainer, 0, TIMEOUT_SECONDS)
    counts = [row["steps"] for row in rows_of(cluster.run)]
    if counts != sorted(set(counts)) or counts[-1] <= steps:
        raise ChildProcessError(f"expected increasing steps, got {counts}")
    evaluation = json.loads((cluster.run / "evaluation.json").read_text())
    print(f"{counts[-1]:,} steps, mean return {evaluation['mean_return']:.1f}")


def main() -> None:
    """Test deploy/kubernetes in network namespaces."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = Hosts(["names", "a", "b", "c", "d", "gpu"], search=SEARCH)
        stack.enter_context(hosts.created())
        make_keys(folder)
        cluster = Cluster(hosts, folder)
        stack.callback(cluster.close)
        with print_logs_on_failure(folder):
            check_servers(cluster)
            check_trainer(cluster)


if __name__ == "__main__":
    typer.run(main)
