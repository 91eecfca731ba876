"""Build the Dockerfile's images without Docker, and train in their containers.

    python scripts/build_images.py [--volume /etc/pip.conf:/etc/pip.conf:ro]

Buildah builds both images on a base image from debootstrap, so no registry is needed.
Then the commands of `keys`, `sim` and `trainer` in docker-compose.yml run in containers
of these images, in network namespaces. Prints the sizes of the images, the seconds of
each step, and the mean return. Exits with 1 if a step fails or the agent does not
improve. Images and containers are in a temporary folder, which is removed at the end.
Linux only; requires root and the packages buildah, debootstrap and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import run_compose as compose  # noqa: E402

#: Maps the required Debian packages to their programs.
PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap", "iproute2": "ip"}
#: The base image in the Dockerfile, and the Debian release that contains this Python.
BASE_IMAGE = "docker.io/library/python:3.11-slim"
RELEASE = "bookworm"
#: Provides `python` and `pip`, like the base image.
BASE = "FROM scratch\nCOPY . /\nRUN python3 -m venv /usr/local\n"
USER = 10001  # as in the Dockerfile
#: Starts a command in its own session, so that all its processes can be killed, and in
#: its own mount namespace, so that its mounts end with its processes.
ISOLATED = ("setsid", "unshare", "--mount")


class BuildahCluster(compose.Cluster):
    """The services of docker-compose.yml in containers of buildah."""

    def __init__(self, folder: Path, volumes: list[str]) -> None:
        super().__init__(1, folder)
        services = [self.services[name] for name in ("sim", "trainer")]
        #: Maps the targets of the Dockerfile to the names of their images.
        self.images = {each["build"]["target"]: each["image"] for each in services}
        self._volumes = [f"--volume={volume}" for volume in volumes]
        storage = (f"--root={folder}/storage", f"--runroot={folder}/mounts")
        self._buildah = (*ISOLATED, "buildah", *storage)

    def finish(self, name: str, seconds: float = 3600) -> None:
        """Wait until a process has exited, and check its exit code."""
        process = self.processes[name]
        compose.wait_for(f"{name} ends", lambda: process.poll() is not None, seconds)
        if code := process.returncode:
            raise ChildProcessError(f"{name}: expected exit code 0, got {code}")

    def execute(self, name: str, *words: str) -> None:
        """Run a command of this host to its end; its output goes to the log `name`."""
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, text=True)
        self.processes[name] = process
        self.finish(name)

    def build(self, name: str, image: str, *words: str) -> None:
        """Build an image, and print its size."""
        options = ("--isolation=chroot", "--pull-never", "--layers", *self._volumes)
        build = ("build", *options, f"--tag={image}", *words)
        self.execute(f"build of {name}", *self._buildah, *build)
        size = ("images", "--format={{.Name}}:{{.Tag}} {{.Size}}", image)
        subprocess.run([*self._buildah, *size], check=True)

    def create(self, host: str) -> None:
        """Create the container of a host, with the same name, and its volumes."""
        service = self.services["sim" if host in self.servers else host]
        for volume in service["volumes"]:
            path = self.folder / volume.partition(":")[0]
            path.mkdir(mode=0o700, exist_ok=True)
            os.chown(path, USER, USER)
        words = ("from", "--pull-never", f"--name={host}", service["image"])
        subprocess.run([*self._buildah, *words], check=True, stdout=subprocess.DEVNULL)

    def command(self, host: str, words: list[str]) -> list[str]:
        """Return the command line that runs `words` in the container of a host."""
        service = self.services["sim" if host in self.servers else host]
        options = [f"--volume={self.folder}/{each}" for each in service["volumes"]]
        variables = service.get("environment", {}).items()
        options += [f"--env={key}={value}" for key, value in variables]
        run = (*self._buildah, "run", "--isolation=chroot", "--network=host", *options)
        return self.hosts.command(host, *run, host, "--", *words)

    def close(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):  # all processes have exited
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # if it has not created its session yet
            process.wait()
        self.hosts.remove()


def train(containers: BuildahCluster, steps: int) -> None:
    """Train on the envs of one server, and drain the server."""
    (server,) = containers.servers
    containers.hosts.create()
    for host in ("keys", server, "page", "trainer"):
        containers.create(host)
    containers.start("keys")
    containers.finish("keys")
    containers.start("sim", server)
    # A container of buildah can run only one command at a time.
    address = f"tcp://{server}:5555"
    health = [*compose.health_command()[:-1], address]
    compose.wait_for("sim is healthy", lambda: containers.run("page", "page", health))
    if (user := containers.run("page", "page", ["id", "-u"]).strip()) != str(USER):
        raise ChildProcessError(
            f"expected the container to run as user {USER}, got {user}"
        )
    options = ("--run-dir", "runs/cartpole", "--set", f"total_steps={steps}")
    containers.start("trainer", "", *options)
    containers.finish("trainer")
    containers.run("page", "page", ["envserve", "drain", address])
    containers.finish(server, 60)
    rows = compose.rows_of(containers.folder / "runs" / "cartpole")
    first, last = rows[0]["mean_return"], rows[-1]["mean_return"]
    print(f"{rows[-1]['steps']:,} steps, mean return {last:.1f}, at first {first:.1f}")
    if not last > first:
        raise ChildProcessError(f"expected a mean return above {first}; got {last}")


def main(
    steps: Annotated[int, typer.Option(min=4096, help="Env steps to train.")] = 20_000,
    volume: Annotated[
        list[str] | None,
        typer.Option(help="Volume of the builds, HOST:CONTAINER[:ro]; repeatable."),
    ] = None,
) -> None:
    """Build both images with buildah, and train in their containers."""
    missing = [name for name, file in PACKAGES.items() if shutil.which(file) is None]
    missing += ["root"] if os.geteuid() else []
    if missing:
        wanted = f"expected root and the packages {', '.join(PACKAGES)}"
        sys.exit(f"Error: {wanted}, missing: {', '.join(missing)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["TMPDIR"] = str(folder)  # for the temporary files of buildah
        containers = BuildahCluster(folder, volume or [])
        stack.callback(containers.close)
        stack.enter_context(compose.print_logs_on_failure(folder))
        base, file = str(folder / "base"), folder / "Dockerfile"
        options = ("--variant=minbase", "--include=python3-venv,ca-certificates")
        command = (*ISOLATED, "debootstrap", *options, RELEASE, base)
        containers.execute("debootstrap", *command)
        file.write_text(BASE)
        containers.build("base", BASE_IMAGE, f"--file={file}", base)
        for name, image in containers.images.items():
            containers.build(name, image, f"--target={name}", str(ROOT))
        train(containers, steps)


if __name__ == "__main__":
    typer.run(main)
