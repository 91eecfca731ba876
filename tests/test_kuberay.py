"""deploy/kuberay: commands, resources, keys and versions are consistent.

tests/integration/test_kubernetes.py renders the manifests, and checks them against
schemas.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import yaml

from ppo.config.named_configs import CONFIGS, apply_settings
from tests.pods import ROOT, kustomization
from tests.test_compose import parse
from tests.test_project import PROJECT

FOLDER = ROOT / "deploy" / "kuberay"
CLUSTER, _, POLICY = yaml.safe_load_all((FOLDER / "cluster.yaml").read_text())
JOB = yaml.safe_load((FOLDER / "training.yaml").read_text())
GROUPS = {each["groupName"]: each for each in CLUSTER["spec"]["workerGroupSpecs"]}


def resources_of(group: str) -> dict[str, float]:
    """Return the Ray resources of each node of a group."""
    params = GROUPS[group]["rayStartParams"]
    custom: dict[str, float] = json.loads(json.loads(params["resources"]))
    return {"CPU": float(params["num-cpus"]), **custom}


def commands() -> list[dict[str, Any]]:
    """Return the options of the commands of the training."""
    lines = JOB["spec"]["entrypoint"].replace("\\\n", "").splitlines()
    words = [shlex.split(line.removesuffix("&")) for line in lines]
    return [parse(*each) for each in (words[0], words[2])]


def test_each_process_fits_on_a_node_with_its_keys() -> None:
    servers, learners = commands()
    assert servers["on"] == learners["on"] == "ray"
    for options, count, group in (
        (servers, servers["servers"], "envs"),
        (learners, learners["learners"], "learners"),
    ):
        assert GROUPS[group]["replicas"] == count
        has = resources_of(group)
        assert all(has[name] >= needed for name, needed in options["resources"].items())
        others = {name for name in GROUPS if name != group}
        (own,) = options["resources"].keys() - {"CPU"}
        assert not any(own in resources_of(name) for name in others)
    # The commands, the first learner and the run folder are on one node.
    (driver,) = json.loads(JOB["spec"]["entrypointResources"])
    assert driver in resources_of("learners")
    assert driver not in resources_of("envs")
    (container,) = GROUPS["learners"]["template"]["spec"]["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(str(learners["run_dir"]).startswith(f"{mount}/") for mount in mounts)
    settings = apply_settings(CONFIGS[learners["config"]], learners["set_"])
    assert settings.per_learner(learners["learners"])


def test_keys_are_made_for_the_address_that_the_learners_use() -> None:
    (comment,) = re.findall(
        r"envserve keys make (.*)", (FOLDER / "kustomization.yaml").read_text()
    )
    made = parse("envserve", "keys make", *shlex.split(comment))
    _, learners = commands()
    assert made["at"] == learners["connect"]
    secrets = {each["name"] for each in kustomization(FOLDER)["secretGenerator"]}
    used = [
        volume["secret"]["secretName"]
        for group in GROUPS.values()
        for volume in group["template"]["spec"]["volumes"]
        if "secret" in volume
    ]
    assert sorted(used) == sorted(secrets)
    assert "/deploy/kuberay/keys/" in (ROOT / ".gitignore").read_text().split()


def test_versions_are_those_of_this_release() -> None:
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    version = CLUSTER["spec"]["rayVersion"]
    assert version == pinned[1]
    text = (FOLDER / "kustomization.yaml").read_text()
    assert f"rayproject/ray:{version}-py311\n" in text
    (image,) = kustomization(FOLDER)["images"]
    assert image["newTag"] == PROJECT["version"]


def test_only_pods_of_the_cluster_and_the_operator_connect_to_ray() -> None:
    name = CLUSTER["metadata"]["name"]
    pods = {"podSelector": {"matchLabels": {"ray.io/cluster": name}}}
    assert JOB["spec"]["clusterSelector"] == {"ray.io/cluster": name}
    spec = POLICY["spec"]
    assert {"podSelector": spec["podSelector"]} == pods
    ours, operator = spec["ingress"]
    assert ours == {"from": [pods]}
    assert operator["ports"] == [{"port": 8265}]
    assert spec["egress"][0] == {"to": [pods]}
