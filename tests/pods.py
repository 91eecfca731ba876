"""Pods of deploy/kubernetes without a cluster: what a kubelet makes of a manifest.

Every container is process 1 in the network namespace of its pod. Its root holds what
the images do, volumes are where the manifest mounts them, and user, groups and
capabilities are as it says. That shows no seccomp, no limits of memory and CPU, and no
network policies. For Linux; needs root, iproute2 and util-linux.
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

from tests.left_behind import MARK_NAME
from tests.network_hosts import Hosts

ROOT: Final = Path(__file__).resolve().parent.parent
MANIFESTS: Final = ROOT / "deploy" / "kubernetes"
#: As the Dockerfile has it: what an image runs, and where.
ENTRYPOINTS: Final = {"envserve-server": "envserve", "envserve-trainer": "ppo"}
WORKDIR: Final = "/srv/envserve"
#: Where the code lies, and what it is run by.
CODE: Final = "/opt/envserve"
PYTHON: Final = f"{CODE}/venv/bin/{Path(sys.executable).name}"
#: What the kubelet tells pods of the namespace `default` about names.
DOMAIN: Final = "default.svc.cluster.local"
SEARCH: Final = f"search {DOMAIN} svc.cluster.local cluster.local\noptions ndots:5\n"
Resource = dict[str, Any]


def kustomization(folder: Path = MANIFESTS) -> Resource:
    """The kustomization of a folder."""
    found: Resource = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return found


def resources(*files: str) -> list[Resource]:
    """All resources of files of deploy/kubernetes; by default, of the kustomization."""
    texts = [(MANIFESTS / f).read_text() for f in files or kustomization()["resources"]]
    return [each for text in texts for each in yaml.safe_load_all(text)]


def resource(kind: str, name: str) -> Resource:
    """The one resource of a kind and a name."""
    (found,) = (
        each
        for each in resources()
        if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def pod_spec(kind: str, name: str) -> Resource:
    """What a workload's pods are."""
    spec: Resource = resource(kind, name)["spec"]["template"]["spec"]
    return spec


def document_commands() -> list[str]:
    """The commands by which docs/cluster.md leads to a training."""
    text = (ROOT / "docs" / "cluster.md").read_text()
    _, _, section = text.partition("\n## On Kubernetes\n")
    (found,) = re.findall(
        r"^```sh\n(envserve .*?)\n```$", section.partition("\n## ")[0], re.M | re.S
    )
    return found.splitlines()


def make_keys(folder: Path) -> None:
    """Runs the first of these commands, for keys in this folder in place of its own."""
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
    """The names of a cluster, told by a server on the first of its hosts."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._file = hosts, folder / "names.json"
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
        """Has the service `envs` stand for these pods, as those that are ready."""
        names = {f"{p.name}.envs.{DOMAIN}": [p.address] for p in pods}
        names[f"envs.{DOMAIN}"] = [pod.address for pod in pods]
        draft = self._file.with_suffix(".part")
        draft.write_text(json.dumps(names))
        draft.replace(self._file)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Pod:
    """A pod on a host; `containers` are the processes of those that have begun."""

    def __init__(
        self, name: str, spec: Resource, hosts: Hosts, host: str, folder: Path
    ) -> None:
        """Makes its volumes, empty ones anew.

        Args:
          name: Its own.
          spec: Of the manifest.
          hosts: The network.
          host: Where it is to run; its address is the pod's.
          folder: Of the cluster: `keys`, `claims`, and a folder per pod.
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
        """Returns a volume's folder, with owners and modes as a kubelet gives them."""
        path = self._folder / volume["name"]
        if claim := volume.get("persistentVolumeClaim"):
            assert resource("PersistentVolumeClaim", claim["claimName"])
            path = folder / "claims" / claim["claimName"]
        elif path.exists():  # of a pod that ran here before
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o2777)
        if secret := volume.get("secret"):
            (data := path / "..data").mkdir()
            for file in secret_files(secret["secretName"], folder):
                (data / file.name).write_bytes(file.read_bytes())
                # A group that can read: so it is with fsGroup, whatever the mode.
                (data / file.name).chmod(secret["defaultMode"] | 0o440)
                (path / file.name).symlink_to(f"..data/{file.name}")
        for each in (path, *path.rglob("*")):
            os.chown(each, 0 if secret or each == path else -1, group)
        return path

    def sandboxed(self, container: Resource, words: list[str]) -> list[str]:
        """Returns a command in a container, as process 1 of it."""
        root, script = self._folder / "root", ["umask 022"]

        def put(source: Path, target: str, *, is_private: bool = False) -> None:
            there = f"{root}{target}"
            made = f"mkdir -p {there}"
            if not source.is_dir():
                made = f"mkdir -p {os.path.dirname(there)} && touch {there}"
            script.append(f"{made} && mount --rbind {source} {there}")
            if not is_private:
                script.append(f"mount -o remount,bind,ro {there}")

        script.append(f"mount -t tmpfs -o mode=755 none {root}")
        for name in ("bin", "lib", "lib64", "sbin"):
            if (link := Path("/", name)).is_symlink():
                script.append(f"ln -s {os.readlink(link)} {root}/{name}")
            elif link.exists():
                put(link, f"/{name}")
        for folder in dict.fromkeys(("/usr", "/etc", sys.base_prefix)):
            if folder != "/usr/local":  # which is in /usr
                put(Path(folder), folder)
        # Elsewhere than here, where a volume may hide them.
        put(Path(sys.prefix), f"{CODE}/venv")
        for package in ("envserve", "ppo"):
            put(ROOT / package, f"{CODE}/{package}")
        for name in ("null", "zero", "full", "random", "urandom"):
            put(Path("/dev", name), f"/dev/{name}", is_private=True)
        put(self._folder / "image", "/image")
        script.append(f"mkdir -p {root}{WORKDIR} {root}/proc")
        script.append(f"mount -t proc proc {root}/proc")
        for mount in container["volumeMounts"]:
            path, is_closed = self._volumes[mount["name"]], mount.get("readOnly", False)
            put(path, mount["mountPath"], is_private=not is_closed)
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context["allowPrivilegeEscalation"]
        if context["readOnlyRootFilesystem"]:
            script.append(f"mount -o remount,ro {root}")
        groups = self.spec["securityContext"]["fsGroup"]
        own = {each["name"]: each["value"] for each in container.get("env", [])}
        environment = {
            "PATH": "/image:/usr/bin:/bin",
            "HOME": WORKDIR,
            "PYTHONPATH": CODE,
            "PYTHONUNBUFFERED": "1",
            MARK_NAME: os.environ.get(MARK_NAME, ""),  # so that none is left behind
            **own,
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
        """Starts a container, with more arguments; its output goes to a file."""
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
        """Whether its init containers are done; starts those that have not begun."""
        for process, container in zip(
            [*self._processes, None], self.spec["initContainers"], strict=False
        ):
            begun = process or self.begin(container)
            if begun.poll() is None:
                return False
            if begun.returncode:
                raise ChildProcessError(f"{self.name}: {self.log()[-2000:]}")
        return True

    def start(self, *more: str) -> None:
        """Starts its container, once all init containers have ended."""
        (container,) = self.spec["containers"]
        self.begin(container, *more)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """What has begun last."""
        return self._processes[-1]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in its container, as a probe or `kubectl exec` does."""
        (container,) = self.spec["containers"]
        command = self.sandboxed(container, list(words))
        return subprocess.run(command, capture_output=True, text=True)

    def passes(self, probe: str) -> bool:
        """Whether a probe of its container finds it well."""
        (container,) = self.spec["containers"]
        return self.run(*container[probe]["exec"]["command"]).returncode == 0

    def terminate(self) -> None:
        """Sends the container what a kubelet sends first."""
        _signal(self.process, signal.SIGTERM)

    def kill(self) -> None:
        """Ends all that runs in it, without a word."""
        for process in self._processes:
            while process.poll() is None:  # it may not have begun yet
                _signal(process, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)

    def log(self) -> str:
        """What its containers have said, and those of the pods before it."""
        return self._log.read_text(errors="replace")


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal to process 1 of a container, and so with SIGKILL to all of it."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for child in children.split():
            os.kill(int(child), number)


def secret_files(name: str, folder: Path) -> list[Path]:
    """The files of a secret that the kustomization makes."""
    (found,) = (
        each for each in kustomization()["secretGenerator"] if each["name"] == name
    )
    return [folder / file for file in found["files"]]


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
