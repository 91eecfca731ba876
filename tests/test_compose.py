"""docker-compose.yml: valid, private, and made of commands that exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from envserve.settings import HostSettings

ROOT = Path(__file__).resolve().parent.parent
HEALTH = ["envserve", "health", "--startup", "--live", "tcp://127.0.0.1:5555"]
PROGRAMS = {"server": "envserve", "trainer": "ppo"}
SERVERS = ("sim1", "sim2")
Service = dict[str, Any]


def resolve_without_docker() -> dict[str, Service]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services: dict[str, Service] = document["services"]
    return services


SERVICES = resolve_without_docker()


def output_of(program: str, *words: str) -> str:
    """What a console script prints, on lines wide enough to break no option."""
    finished = subprocess.run(
        [sys.executable, "-c", f"from {program}.cli import main; main()", *words],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def stages() -> dict[str, str]:
    """The stages of the Dockerfile: name -> instructions."""
    parts = re.split(
        r"^FROM \S+ AS (\w+)\n", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.skipif(
    shutil.which("docker-compose") is None and not os.environ.get("CI"),
    reason="docker-compose is not installed (where CI is set, that fails)",
)
def test_docker_compose_accepts_the_file_and_reads_it_as_these_tests_do() -> None:
    finished = subprocess.run(
        ["docker-compose", "--file", str(ROOT / "docker-compose.yml"), "config"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    resolved = yaml.safe_load(finished.stdout)
    assert resolved["networks"] == {"simulation": {"internal": True}}
    assert resolved["services"].keys() == SERVICES.keys()
    for name, service in SERVICES.items():
        for key in ("command", "healthcheck", "depends_on", "image", "environment"):
            assert resolved["services"][name].get(key) == service.get(key), (name, key)


def test_services_share_one_private_network_and_publish_nothing() -> None:
    assert SERVICES.keys() == {"keys", *SERVERS, "trainer"}
    for service in SERVICES.values():
        assert service["networks"] == ["simulation"]
        assert not service.keys() & {"ports", "network_mode", "privileged"}


def test_an_env_cannot_fill_the_host() -> None:
    for service in SERVICES.values():
        assert service["pids_limit"] == 512
        assert service["mem_limit"] == "4g"
        assert service["cap_drop"] == ["ALL"]


def test_keys_are_made_before_they_are_used_and_each_role_sees_its_own() -> None:
    keys = SERVICES["keys"]
    assert keys["command"][:3] == ["keys", "make", "/keys"]
    _, *roles = (word for word in keys["command"][2:] if not word.startswith("-"))
    ats = [f"tcp://{name}:5555" for name in SERVERS]
    assert roles == ["server", "trainer", *ats]
    assert keys["volumes"] == [f"{role}-keys:/keys/{role}" for role in roles[:2]]
    done = {"keys": {"condition": "service_completed_successfully"}}
    for name in (*SERVERS, "trainer"):
        service = SERVICES[name]
        role = "trainer" if name == "trainer" else "server"
        assert service["environment"] == {"ENVSERVE_HOME": f"/keys/{role}"}
        mounted = [v for v in service["volumes"] if "keys" in v]
        assert mounted == [f"{role}-keys:/keys/{role}:ro"]
        assert f"/keys/{role}" in stages()["base"]
        assert role == "trainer" or service["depends_on"] == done
        assert "--insecure-no-auth" not in service["command"]


def test_trainer_waits_for_the_health_of_every_server_that_it_connects_to() -> None:
    trainer = SERVICES["trainer"]
    connected = [word for word in trainer["command"] if word.startswith("tcp://")]
    assert connected == [f"tcp://{name}:5555" for name in SERVERS]
    healthy = {"condition": "service_healthy"}
    assert trainer["depends_on"] == dict.fromkeys(SERVERS, healthy)
    for name in SERVERS:
        _, *test = SERVICES[name]["healthcheck"]["test"]
        assert test == HEALTH
        assert "tcp://0.0.0.0:5555" in SERVICES[name]["command"]


@pytest.mark.parametrize("name", SERVICES)
def test_command_and_its_options_exist(name: str) -> None:
    service = SERVICES[name]
    program = PROGRAMS[service["build"]["target"]]
    words = service["command"]
    subcommand = words[: 2 if words[0] == "keys" else 1]
    known = output_of(program, *subcommand, "--help")
    options = {word for word in words if word.startswith("--")}
    missing = {o for o in options if not re.search(rf"(?<!\S){o}\b", known)}
    assert not missing, known


def test_health_command_and_its_probes_exist() -> None:
    known = output_of("envserve", "health", "--help")
    assert "ADDRESS" in known.upper()
    assert all(word in known for word in HEALTH if word.startswith("--"))


def test_server_image_asks_for_health_where_the_server_listens_by_default() -> None:
    (test,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", stages()["server"], re.M)
    assert yaml.safe_load(test) == HEALTH
    (address,) = HostSettings().binds
    assert address == HEALTH[-1]


def test_a_drain_ends_before_docker_kills() -> None:
    assert not any("stop_grace_period" in service for service in SERVICES.values())
    assert HostSettings().drain_grace_seconds + 1 < 10


def test_trained_config_exists() -> None:
    command = SERVICES["trainer"]["command"]
    assert command[:2] == ["train", "cartpole"]
    assert re.search(r"\bcartpole\b", output_of("ppo", "configs"))


def test_images_run_their_program_as_an_ordinary_user() -> None:
    for target, program in PROGRAMS.items():
        stage = stages()[target]
        assert f'ENTRYPOINT ["{program}"]' in stage
        assert "USER envserve" in stage


def test_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    copies = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    for name in " ".join(copies).split():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in allowed


def test_server_image_installs_no_tensorflow() -> None:
    extras = {
        name: set(re.findall(r"[\w-]+(?=[\],])", text.partition('".[')[2]))
        for name, text in stages().items()
    }
    assert "train-cpu" in extras["trainer"]
    assert extras["server"] & {"train", "train-cpu"} == set()
    assert "mujoco" in extras["server"]


def test_volume_of_runs_is_a_folder_that_the_image_prepares() -> None:
    volume, _, path = SERVICES["trainer"]["volumes"][-1].partition(":")
    assert volume == "runs"
    assert path in stages()["base"]
