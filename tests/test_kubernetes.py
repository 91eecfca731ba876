"""deploy/kubernetes: names are consistent, commands exist, and keys are readable.

tests/integration/test_kubernetes.py checks the schemas, and trains in the pods.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envserve.settings import HostSettings
from ppo.cli.run_setup import read_tf_config
from ppo.config.named_configs import CONFIGS, apply_settings
from tests.network_hosts import Hosts, needs_namespaces
from tests.pods import (
    ENTRYPOINTS,
    MANIFESTS,
    ROOT,
    SEARCH,
    WORKDIR,
    Names,
    Pod,
    document_commands,
    kustomization,
    make_keys,
    pod_spec,
    resource,
    resources,
)
from tests.test_compose import HEALTH, parse, stages
from tests.test_project import PROJECT

SERVERS, TRAINER = pod_spec("Deployment", "envs"), pod_spec("Job", "trainer")
PODS = pytest.mark.parametrize("spec", [SERVERS, TRAINER], ids=["envs", "trainer"])
(SERVER,), (LEARNER,) = SERVERS["containers"], TRAINER["containers"]
ADDRESS = "tcp://0.0.0.0:5555"
#: A client that steps the envs on all servers that the name resolves to.
STEPS = """
from envserve.client import BatchEnv
with BatchEnv.connect("CartPole-v1", ["dns://envs:5555"], num_envs=8, seed=0) as env:
    env.reset()
    for _ in range(20):
        step = env.step([1] * 8)
    print(len(env.stats().lanes), step.valid.sum())
"""


def options_of(container: dict[str, Any]) -> dict[str, Any]:
    return parse(ENTRYPOINTS[container["image"]], *container["args"])


def labels_of(kind: str, name: str) -> dict[str, str]:
    labels: dict[str, str] = resource(kind, name)["spec"]["template"]["metadata"][
        "labels"
    ]
    return labels


def test_a_wrong_option_would_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("envserve", *SERVER["args"], "--drain-gracious", "1")
    assert "there is no option --drain-gracious" in capsys.readouterr().err


def test_trainers_connect_to_the_name_and_port_where_servers_listen() -> None:
    service = resource("Service", "envs")["spec"]
    assert service["clusterIP"] == "None"  # the name resolves to all pods
    (port,) = service["ports"]
    assert options_of(LEARNER)["connect"] == [f"dns://envs:{port['port']}"]
    assert options_of(SERVER)["binds"] == (ADDRESS,)
    assert ADDRESS.endswith(f":{port['port']}")
    metrics = {"name": "metrics", "containerPort": options_of(SERVER)["metrics_port"]}
    envs = {"name": "envserve", "containerPort": port["port"]}
    assert SERVER["ports"] == [envs, metrics]


def test_selectors_match_the_labels_of_servers_and_trainers() -> None:
    servers, trainers = labels_of("Deployment", "envs"), labels_of("Job", "trainer")
    assert resource("Service", "envs")["spec"]["selector"] == servers
    selected = {"matchLabels": servers}
    assert resource("Deployment", "envs")["spec"]["selector"] == selected
    assert resource("PodDisruptionBudget", "envs")["spec"]["selector"] == selected
    inward = resource("NetworkPolicy", "envs")["spec"]
    outward = resource("NetworkPolicy", "trainer")["spec"]
    assert inward["podSelector"] == selected
    assert outward["podSelector"] == {"matchLabels": trainers}
    for policy in (inward, outward):
        assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert inward["ingress"] == [
        {"from": [{"podSelector": outward["podSelector"]}], "ports": [{"port": 5555}]}
    ]
    assert "egress" not in inward  # envs are untrusted code
    assert "ingress" not in outward
    to_servers, to_names = outward["egress"]
    assert to_servers == {"to": [{"podSelector": selected}], "ports": [{"port": 5555}]}
    assert {each["port"] for each in to_names["ports"]} == {53}


def test_probes_run_the_health_check_of_the_image_without_readiness() -> None:
    for probe in ("startupProbe", "livenessProbe"):
        assert SERVER[probe]["exec"]["command"] == HEALTH
        parse(*SERVER[probe]["exec"]["command"])
        # The kubelet waits longer than `health` itself.
        assert SERVER[probe]["timeoutSeconds"] >= 5 * parse(*HEALTH)["timeout"]
    assert "readinessProbe" not in SERVER


def test_a_server_drains_before_its_pod_is_killed() -> None:
    drain = float(options_of(SERVER)["drain_grace_seconds"])
    assert drain > HostSettings().drain_grace_seconds  # pods have more time than Docker
    assert drain + 5 <= SERVERS["terminationGracePeriodSeconds"]


def test_the_job_restarts_stopped_trainers_and_fails_on_wrong_configurations() -> None:
    options = options_of(LEARNER)
    assert options["restartable"]
    settings = apply_settings(CONFIGS[options["config"]], options["set_"])
    assert settings.on_server_lost == "pad"  # rescheduling a pod takes long
    assert TRAINER["restartPolicy"] == "Never"  # required by podFailurePolicy
    job = resource("Job", "trainer")["spec"]
    evicted, stopped, refused = job["podFailurePolicy"]["rules"]
    assert evicted["onPodConditions"][0]["type"] == "DisruptionTarget"
    codes = (ROOT / "docs" / "exit-codes.md").read_text()
    assert re.search(r"^\| ppo train \| 3 \| with `--restartable`", codes, re.M)
    assert re.search(r"^\| all \| 2 \| the request is invalid", codes, re.M)
    assert "also exits with 1 if its addresses resolve to no server" in codes
    for rule, action, code in ((stopped, "Ignore", 3), (refused, "FailJob", 2)):
        assert rule["action"] == action
        assert rule["onExitCodes"]["containerName"] == LEARNER["name"]
        assert rule["onExitCodes"]["values"] == [code]
    assert evicted["action"] == "Ignore"
    assert job["podReplacementPolicy"] == "Failed"  # never two pods with one run folder


def test_the_run_folder_is_on_the_mounted_volume() -> None:
    mounts = {each["name"]: each["mountPath"] for each in LEARNER["volumeMounts"]}
    assert mounts["runs"] == f"{WORKDIR}/runs"
    assert Path(WORKDIR, options_of(LEARNER)["run_dir"]).is_relative_to(mounts["runs"])
    assert f"WORKDIR {WORKDIR}" in stages()["trainer"]
    assert mounts["runs"] in stages()["base"]


def test_the_trainer_starts_with_one_server_and_can_use_all() -> None:
    (container,) = TRAINER["initContainers"]
    assert "until getent hosts envs;" in container["command"][-1]
    replicas = resource("Deployment", "envs")["spec"]["replicas"]
    options = options_of(LEARNER)
    assert options["min_servers"] == 1
    settings = apply_settings(CONFIGS[options["config"]], options["set_"])
    assert settings.num_servers == replicas
    (scaler,) = resources("keda.yaml")
    assert scaler["spec"]["minReplicaCount"] == replicas
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "envs")
    assert "keda.yaml" not in kustomization()["resources"]


def test_metrics_are_open_to_prometheus_only() -> None:
    folder = MANIFESTS / "monitoring"
    assert kustomization(folder)["resources"] == ["metrics.yaml"]
    monitor, policy = resources("monitoring/metrics.yaml")
    selected = {"matchLabels": labels_of("Deployment", "envs")}
    assert monitor["spec"]["selector"] == selected
    job = {"targetLabel": "job", "replacement": "envserve"}  # see the alerts
    endpoint = {"port": "metrics", "relabelings": [job]}
    assert monitor["spec"]["podMetricsEndpoints"] == [endpoint]
    assert policy["spec"]["podSelector"] == selected
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": options_of(SERVER)["metrics_port"]}]
    (scaler,) = resources("keda.yaml")
    (trigger,) = scaler["spec"]["triggers"]
    names = set(re.findall(r"\benvserve_\w+", trigger["metadata"]["query"]))
    documented = (ROOT / "docs" / "metrics-of-servers.md").read_text()
    assert names == {"envserve_envs", "envserve_free_envs"}
    assert all(f"`{name}`" in documented for name in names)
    most = int(options_of(SERVER)["num_workers"]) * HostSettings().envs_per_worker
    assert float(trigger["metadata"]["threshold"]) == 0.75 * most


@pytest.mark.parametrize("index", [0, 1])
def test_learners_get_a_valid_tf_config_from_their_index(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = (r for r in resources("learners.yaml") if r["kind"] == "Job")
    spec = job["spec"]["template"]["spec"]
    (learner,) = spec["containers"]
    script, command = learner["command"][-1].split("exec ")
    env = {"JOB_COMPLETION_INDEX": str(index), "PATH": "/usr/bin:/bin"}
    words = ["sh", "-ec", f'{script}printf %s "$TF_CONFIG"']
    shown = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    monkeypatch.setenv("TF_CONFIG", shown.stdout)
    addresses, found = read_tf_config(None, None)
    assert found == index
    name, port = job["metadata"]["name"], learner["ports"][0]["containerPort"]
    num = job["spec"]["completions"]
    domain = spec["subdomain"]
    assert addresses == [f"{name}-{n}.{domain}:{port}" for n in range(num)]
    options = parse(*shlex.split(command.replace("\\\n", "")))
    assert options["distribute"]
    assert options["restartable"]
    settings = apply_settings(CONFIGS[options["config"]], options["set_"])
    assert settings.per_learner(num)
    assert spec["volumes"][0] == TRAINER["volumes"][0]


@PODS
def test_pods_meet_the_pod_security_standard_restricted(spec: dict[str, Any]) -> None:
    user = stages()["server"].partition("USER ")[2].split()[0]
    context = spec["securityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert context["fsGroup"] == context["runAsGroup"]
    assert context["runAsNonRoot"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "hostUsers"}
    kinds = {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}}
    assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret"}
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in spec["volumes"]}
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}


@PODS
def test_keys_are_copied_from_a_secret_of_the_kustomization(
    spec: dict[str, Any],
) -> None:
    (secret,) = (v["secret"] for v in spec["volumes"] if "secret" in v)
    made = {each["name"] for each in kustomization()["secretGenerator"]}
    assert secret["secretName"] in made
    assert secret["defaultMode"] == 0o400
    (home,) = (e for e in spec["containers"][0]["env"] if e["name"] == "ENVSERVE_HOME")
    (container,) = spec["initContainers"]
    words = container["command"][-1].splitlines()[0]
    assert words.endswith(f"install -m 600 /secret/* {home['value']}")
    assert words in (ROOT / "docs" / "security.md").read_text()
    (memory,) = (v for v in spec["volumes"] if v["name"] == "keys")
    assert memory["emptyDir"] == {"medium": "Memory"}


def test_secrets_contain_the_files_that_keys_make_creates(tmp_path: Path) -> None:
    make_keys(tmp_path)
    made = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    named = [
        file for each in kustomization()["secretGenerator"] for file in each["files"]
    ]
    assert sorted(named) == sorted(made)
    assert "/deploy/kubernetes/keys/" in (ROOT / ".gitignore").read_text().split()


def test_images_have_the_names_and_the_version_of_this_release() -> None:
    images = kustomization()["images"]
    assert [each["name"] for each in images] == sorted(ENTRYPOINTS)
    assert {each["newTag"] for each in images} == {PROJECT["version"]}
    for each in images:
        assert each["newName"] == f"ghcr.io/envserve/{each['name']}"
    for image, program in ENTRYPOINTS.items():
        stage = stages()[image.removeprefix("envserve-")]
        assert f'ENTRYPOINT ["{program}"]' in stage
    specs = (SERVERS, TRAINER)
    used = {c["image"] for s in specs for c in (*s["initContainers"], *s["containers"])}
    assert used == set(ENTRYPOINTS)


def test_three_documented_commands_start_a_training() -> None:
    _, apply, follow = document_commands()
    assert apply == f"kubectl apply -k {MANIFESTS.relative_to(ROOT)}"
    assert follow.endswith("kubectl logs -f job/trainer")
    assert resource("Job", "trainer")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(["names", "a", "b", "gpu"], search=SEARCH).created() as hosts:
        yield hosts


def wait_until(pod: Pod, condition: str, *arguments: str) -> None:
    """Wait until a pod meets a condition; give up at the test's time limit."""
    while not getattr(pod, condition)(*arguments):
        assert pod.process.poll() in (None, 0), pod.log()


@needs_namespaces
def test_pods_read_their_keys_connect_to_each_other_and_drain(
    hosts: Hosts, tmp_path: Path
) -> None:
    make_keys(tmp_path)
    names = Names(hosts, tmp_path)
    servers = [
        Pod(f"envs-{i}", SERVERS, hosts, host, tmp_path) for i, host in enumerate("ab")
    ]
    trainer = Pod("trainer", TRAINER, hosts, "gpu", tmp_path)
    try:
        assert not trainer.is_initialised()
        for pod in servers:
            wait_until(pod, "is_initialised")
            pod.start()
        for pod in servers:
            wait_until(pod, "passes", "startupProbe")
        assert not trainer.is_initialised()  # the name does not resolve yet
        names.publish(*servers)
        wait_until(trainer, "is_initialised")
        stepped = trainer.run("python", "-c", STEPS)
        assert stepped.stdout == "2 8\n", stepped.stderr
        written = servers[0].run("python", "-c", "open('/srv/x', 'w')")
        assert "Read-only file system" in written.stderr
        wait_until(servers[0], "passes", "livenessProbe")
        servers[0].terminate()
        assert servers[0].process.wait() == 0, servers[0].log()
    finally:
        for pod in (trainer, *servers):
            pod.kill()
        names.close()
