"""Run the pods of deploy/kubernetes without a cluster.

Every container is process 1 in its pod's network namespace. Its root contains the same
programs as the images, and its volumes, user, groups and capabilities are those in the
manifest. Seccomp, memory and CPU limits, and network policies are not applied. This
needs Linux, root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from tests.leak_checks import MARK_NAME
from tests.network_hosts import Hosts

ROOT: Final = Path(__file__).resolve().parent.parent
MANIFESTS: Final = ROOT / "deploy" / "kubernetes"
#: The programs that the images run, and their working directory, as in the Dockerfile.
ENTRYPOINTS: Final = {"envserve-server": "envserve", "envserve-trainer": "ppo"}
WORKDIR: Final = "/srv/envserve"
#: Folder of the code in a container, and the Python interpreter.
CODE: Final = "/opt/envserve"
PYTHON: Final = f"{CODE}/venv/bin/{Path(sys.executable).name}"
#: The search domains that the kubelet configures for pods of the namespace `default`.
DOMAIN: Final = "default.svc.cluster.local"
SEARCH: Final = f"search {DOMAIN} svc.cluster.local cluster.local\noptions ndots:5\n"
Resource = dict[str, Any]


def kustomization(folder: Path = MANIFESTS) -> Resource:
    """Return a folder's kustomization."""
    content: Resource = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return content


def resources(*files: str) -> list[Resource]:
    """Return all resources in the files, by default those of the kustomization."""
    texts = [(MANIFESTS / f).read_text() for f in files or kustomization()["resources"]]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def resource(kind: str, name: str) -> Resource:
    """Return the only resource with this kind and name."""
    (found,) = (
        each
        for each in resources()
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def pod_spec(kind: str, name: str) -> Resource:
    """Return the pod spec of a workload."""
    spec: Resource = resource(kind, name)["spec"]["template"]["spec"]
    return spec


def document_commands() -> list[str]:
    """Return the commands in docs/cluster.md that start a training run."""
    text = (ROOT / "docs" / "cluster.md").read_text()
    _, _, section = text.partition("\n## On Kubernetes\n")
    (found,) = re.findall(
        r"^```sh\n(envserve .*?)\n```$", section.partition("\n## ")[0], re.M | re.S
    )
    return found.splitlines()


def make_keys(folder: Path) -> None:
    """Run the command that makes keys, but create them in another folder."""
    _, *words = shlex.split(document_commands()[0])
    assert ROOT / words[2] == MANIFESTS / "keys"
    words[2] = str(folder / "keys")
    done = subprocess.run(
        [sys.executable, "-m", "envserve", *words],
        cwd=ROOT,
        env=os.environ | {"ENVSERVE_HOME": str(folder / "none")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


class Names:
    """A cluster's DNS names, served by a name server on its first host."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._file = folder / "names.json"
        self._addresses: dict[str, list[str]] = {}
        self.publish()
        host, address = next(iter(hosts.addresses.items()))
        program = str(ROOT / "tests" / "name_server.py")
        words = (sys.executable, program, address, str(self._file))
        self._process = subprocess.Popen(
            hosts.command(host, *words), stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def publish(self, *pods: Pod) -> None:
        """Make the service name `envs` resolve to these ready pods."""
        names = {f"{p.name}.envs.{DOMAIN}": [p.address] for p in pods}
        names[f"envs.{DOMAIN}"] = [pod.address for pod in pods]
        draft = self._file.with_suffix(".part")
        draft.write_text(json.dumps(names))
        draft.replace(self._file)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Pod:
    """A pod that runs on a host."""

    def __init__(
        self, name: str, spec: Resource, hosts: Hosts, host: str, folder: Path
    ) -> None:
        """Create the pod's volumes; existing emptyDir volumes are emptied.

        Args:
          name: Name of the pod.
          spec: Pod spec from the manifest.
          hosts: Network of the cluster.
          host: Host to run the pod on; the pod has its address.
          folder: Folder of the cluster, with `keys`, `claims`, and a folder per pod.
        """
        self.name, self.spec, self.address = name, spec, hosts.addresses[host]
        self._folder = folder / f"{name}-on-{host}"
        self._log = folder / f"{name}.log"
        self._command = partial(hosts.command, host)
        self._processes: list[subprocess.Popen[bytes]] = []
        (self._folder / "root").mkdir(parents=True, exist_ok=True)
        context = spec["securityContext"]
        self._user, self._group = context["runAsUser"], context["runAsGroup"]
        self._volumes = {
            volume["name"]: self._make_volume(volume, folder, context["fsGroup"])
            for volume in spec["volumes"]
        }
        _write_programs(self._folder / "image")

    def _make_volume(self, volume: Resource, folder: Path, group: int) -> Path:
        """Create a volume's folder, with the owner and mode that a kubelet sets."""
        path = self._folder / volume["name"]
        if claim := volume.get("persistentVolumeClaim"):
            assert resource("PersistentVolumeClaim", claim["claimName"])
            path = folder / "claims" / claim["claimName"]
        elif path.exists():  # an earlier pod of this name has run on this host
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o2777)
        if secret := volume.get("secret"):
            (data := path / "..data").mkdir()
            for file in secret_files(secret["secretName"], folder):
                (data / file.name).write_bytes(file.read_bytes())
                # With fsGroup, the group can always read, whatever the mode.
                (data / file.name).chmod(secret["defaultMode"] | 0o440)
                (path / file.name).symlink_to(f"..data/{file.name}")
        for each in (path, *path.rglob("*")):
            os.chown(each, 0 if secret or each == path else -1, group)
        return path

    def sandboxed(self, container: Resource, words: list[str]) -> list[str]:
        """Return the command that runs `words` as process 1 of a container."""
        root, script = self._folder / "root", ["umask 022"]

        def put(source: Path, target: str, *, is_writable: bool = False) -> None:
            mount_point = f"{root}{target}"
            create = f"mkdir -p {mount_point}"
            if not source.is_dir():
                create = f"mkdir -p {os.path.dirname(mount_point)}"
                create += f" && touch {mount_point}"
            script.append(f"{create} && mount --rbind {source} {mount_point}")
            if not is_writable:
                script.append(f"mount -o remount,bind,ro {mount_point}")

        script.append(f"mount -t tmpfs -o mode=755 none {root}")
        for name in ("bin", "lib", "lib64", "sbin"):
            if (link := Path("/", name)).is_symlink():
                script.append(f"ln -s {os.readlink(link)} {root}/{name}")
            elif link.exists():
                put(link, f"/{name}")
        for folder in dict.fromkeys(("/usr", "/etc", sys.base_prefix)):
            if folder != "/usr/local":  # part of /usr
                put(Path(folder), folder)
        # Do not mount them at their path on this host, where a volume may hide them.
        put(Path(sys.prefix), f"{CODE}/venv")
        for package in ("envserve", "ppo"):
            put(ROOT / package, f"{CODE}/{package}")
        for name in ("null", "zero", "full", "random", "urandom"):
            put(Path("/dev", name), f"/dev/{name}", is_writable=True)
        put(self._folder / "image", "/image")
        script.append(f"mkdir -p {root}{WORKDIR} {root}/proc")
        script.append(f"mount -t proc proc {root}/proc")
        for mount in container["volumeMounts"]:
            path, is_read_only = self._volumes[mount["name"]], mount.get("readOnly")
            put(path, mount["mountPath"], is_writable=not is_read_only)
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context["allowPrivilegeEscalation"]
        if context["readOnlyRootFilesystem"]:
            script.append(f"mount -o remount,ro {root}")
        groups = self.spec["securityContext"]["fsGroup"]
        variables = {each["name"]: each["value"] for each in container.get("env", [])}
        environment = {
            "PATH": "/image:/usr/bin:/bin",
            "HOME": WORKDIR,
            "PYTHONPATH": CODE,
            "PYTHONUNBUFFERED": "1",
            MARK_NAME: os.environ.get(MARK_NAME, ""),  # for tests/leak_checks.py
            **variables,
        }
        inside = [
            *("chroot", str(root), "setpriv", "--reuid", str(self._user)),
            *("--regid", str(self._group), "--groups", str(groups), "--no-new-privs"),
            *("--inh-caps=-all", "--bounding-set=-all", "env", "-i", "-C", WORKDIR),
            *(f"{name}={value}" for name, value in environment.items()),
            *words,
        ]
        script.append(f"exec {shlex.join(inside)}")
        unshare = ("unshare", "--mount", "--pid", "--fork")
        return self._command(*unshare, "sh", "-ec", "\n".join(script))

    def begin(self, container: Resource, *more: str) -> subprocess.Popen[bytes]:
        """Start a container with additional arguments; its output goes to the log."""
        words = [*container.get("command", ()), *container.get("args", ()), *more]
        if "command" not in container:
            words = [ENTRYPOINTS[container["image"]], *words]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self.sandboxed(container, words), stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    def is_initialised(self) -> bool:
        """Start the next init container if necessary; return whether all have ended."""
        for process, container in zip(
            [*self._processes, None], self.spec["initContainers"], strict=False
        ):
            started = process or self.begin(container)
            if started.poll() is None:
                return False
            if started.returncode:
                raise ChildProcessError(
                    f"{self.name}: expected exit code 0, got {started.returncode}:\n"
                    f"{self.log()[-2000:]}"
                )
        return True

    def start(self, *more: str) -> None:
        """Start the main container; all init containers must have ended."""
        (container,) = self.spec["containers"]
        self.begin(container, *more)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The most recently started process."""
        return self._processes[-1]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, like a probe or `kubectl exec`."""
        (container,) = self.spec["containers"]
        command = self.sandboxed(container, list(words))
        return subprocess.run(command, capture_output=True, text=True)

    def passes(self, probe: str) -> bool:
        """Return whether a probe of the container succeeds."""
        (container,) = self.spec["containers"]
        return self.run(*container[probe]["exec"]["command"]).returncode == 0

    def terminate(self) -> None:
        """Send SIGTERM to the container, like a kubelet that deletes the pod."""
        _signal(self.process, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all of the pod's processes."""
        for process in self._processes:
            while process.poll() is None:  # repeat, because process 1 may start later
                _signal(process, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)

    def log(self) -> str:
        """Return the output of all containers of this pod and of earlier ones."""
        return self._log.read_text(errors="replace")


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a container's process 1; SIGKILL ends the whole container."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for child in children.split():
            os.kill(int(child), number)


def secret_files(name: str, folder: Path) -> list[Path]:
    """Return the files in a secret that the kustomization generates."""
    (secret,) = (
        each for each in kustomization()["secretGenerator"] if each["name"] == name
    )
    return [folder / file for file in secret["files"]]


def _write_programs(folder: Path) -> None:
    programs: Mapping[str, str] = {
        "envserve": "-m envserve",
        "ppo": "-c 'from ppo.cli.app import main; main()'",
        "python": "",
    }
    folder.mkdir(exist_ok=True)
    for name, words in programs.items():
        text = f'#!/bin/sh\nexec {PYTHON} {words} "$@"\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
