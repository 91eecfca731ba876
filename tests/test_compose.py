"""docker-compose.yml and deploy/: validity, secrecy of keys, and existing options."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import envserve.cli.app
import ppo.cli.app
from envserve.cli import program as command_lines
from envserve.settings import HostSettings
from ppo.config.named_configs import CONFIGS
from scripts import build_images

ROOT = Path(__file__).resolve().parent.parent
HEALTH = ["envserve", "health", "--startup", "--live", "tcp://127.0.0.1:5555"]
PROGRAMS = {"server": "envserve", "trainer": "ppo"}
#: Services that run a command of this project, and those with a user interface.
WITH_OUR_COMMAND = ("keys", "sim", "trainer", "page")
WITH_UI = ("page", "tensorboard", "prometheus", "grafana")
Service = dict[str, Any]


COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Service] = COMPOSE["services"]


def parse(program: str, command: str, *words: str) -> dict[str, Any]:
    """Parse a command line without running the command; return its options."""
    app = {"envserve": envserve.cli.app, "ppo": ppo.cli.app}[program].PROGRAM
    function = app.command(command)
    defaults = {o.name: o.default for o in command_lines.options_of(function)}
    values = command_lines.parse(function, words, command)
    return defaults | values | values.get("fields", {})


def stages() -> dict[str, str]:
    """Return the instructions of each Dockerfile stage, by stage name."""
    parts = re.split(
        r"^FROM \S+ AS (\w+)\n", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.skipif(
    shutil.which("docker-compose") is None and not os.environ.get("CI"),
    reason="docker-compose is not installed (if CI is set, the test fails instead)",
)
def test_docker_compose_accepts_the_file_and_parses_it_like_these_tests() -> None:
    finished = subprocess.run(
        ["docker-compose", "--file", str(ROOT / "docker-compose.yml"), "config"],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    resolved = yaml.safe_load(finished.stdout)
    assert resolved["networks"] == {"simulation": {"internal": True}, "ui": {}}
    assert resolved["services"].keys() == SERVICES.keys()
    for name, service in SERVICES.items():
        for key in ("command", "image", "environment", "profiles"):
            assert resolved["services"][name].get(key) == service.get(key), (name, key)


def test_only_user_interfaces_have_ports_and_only_on_this_host() -> None:
    assert SERVICES.keys() == {*WITH_OUR_COMMAND, *WITH_UI}
    for name, service in SERVICES.items():
        assert not service.keys() & {"network_mode", "privileged"}
        if name in WITH_UI:
            assert all(port.startswith("127.0.0.1:") for port in service["ports"])
            assert service["profiles"]
        else:
            assert "ports" not in service
            assert service["networks"] == ["simulation"]


def test_all_services_have_limits_of_memory_and_processes() -> None:
    for service in SERVICES.values():
        assert service["pids_limit"] == 512
        assert service["mem_limit"] == "4g"
        assert service["cap_drop"] == ["ALL"]


def test_keys_are_created_first_and_each_role_can_read_only_its_own() -> None:
    keys = SERVICES["keys"]
    roles = ("server", "trainer", "local")
    words = ["keys", "make", "/keys", *roles, "--at", "tcp://*:5555"]
    assert keys["command"] == words
    assert keys["volumes"] == [f"{role}-keys:/keys/{role}" for role in roles]
    done = {"condition": "service_completed_successfully"}
    assert SERVICES["sim"]["depends_on"] == {"keys": done}
    for name in WITH_OUR_COMMAND[1:]:
        service = SERVICES[name]
        # Only the servers can read their secret key.
        role = {"sim": "server", "trainer": "trainer", "page": "local"}[name]
        assert service["environment"] == {"ENVSERVE_HOME": f"/keys/{role}"}
        mounted = [v for v in service["volumes"] if "keys" in v]
        assert mounted == [f"{role}-keys:/keys/{role}:ro"]
        assert f"/keys/{role}" in stages()["base"]
        assert "--insecure-no-auth" not in service["command"]


@pytest.mark.parametrize("name", ["trainer", "page"])
def test_trainer_and_page_connect_to_all_servers_once_they_are_healthy(
    name: str,
) -> None:
    assert "dns://sim:5555" in SERVICES[name]["command"]
    assert SERVICES[name]["depends_on"] == {"sim": {"condition": "service_healthy"}}
    assert "tcp://0.0.0.0:5555" in SERVICES["sim"]["command"]
    assert "healthcheck" not in SERVICES["sim"]  # the image has a health check


@pytest.mark.parametrize("name", WITH_OUR_COMMAND)
def test_the_command_of_a_service_and_its_options_exist(name: str) -> None:
    service = SERVICES[name]
    image = service["image"].removeprefix("ghcr.io/envserve/envserve-")
    program = PROGRAMS[image.partition(":")[0]]
    length = 2 if service["command"][0] == "keys" else 1
    command, words = service["command"][:length], service["command"][length:]
    parse(program, " ".join(command), *words)


def test_the_health_check_of_the_image_uses_the_default_address() -> None:
    (test,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", stages()["server"], re.M)
    assert yaml.safe_load(test) == HEALTH
    (address,) = HostSettings().binds
    assert address == HEALTH[-1]


def test_docker_24_and_buildah_of_debian_12_accept_the_health_check() -> None:
    (options,) = re.findall(r"^HEALTHCHECK (.*) \\$", stages()["server"], re.M)
    names = re.findall(r"--([\w-]+)=", options)
    assert set(names) <= {"interval", "timeout", "start-period", "retries"}


def test_a_server_drains_before_docker_kills_it() -> None:
    assert not any("stop_grace_period" in service for service in SERVICES.values())
    assert HostSettings().drain_grace_seconds + 1 < 10


def test_the_config_of_the_trainer_exists() -> None:
    command = SERVICES["trainer"]["command"]
    assert command[0] == "train"
    assert command[1] in CONFIGS


def test_images_run_their_program_as_an_unprivileged_user() -> None:
    for target, program in PROGRAMS.items():
        stage = stages()[target]
        assert f'ENTRYPOINT ["{program}"]' in stage
        assert "USER 10001:10001" in stage  # Kubernetes can check numeric ids
    assert "--uid 10001" in stages()["base"]


def test_the_dockerfile_copies_existing_files_that_are_not_ignored() -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    copies = re.findall(r"^COPY (.*?) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    for name in " ".join(copies).split():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in allowed


def test_the_server_image_does_not_contain_tensorflow() -> None:
    extras = {
        name: set(re.findall(r"[\w-]+(?=[\],])", text.partition('".[')[2]))
        for name, text in stages().items()
    }
    assert "train-cpu" in extras["trainer"]
    assert extras["server"] & {"train", "train-cpu"} == set()
    assert "mujoco" in extras["server"]


def test_the_build_script_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda file: file if file == "ip" else None)
    with pytest.raises(SystemExit, match=r"missing: buildah, debootstrap, root$"):
        build_images.main()


def test_the_build_script_runs_the_services_in_containers_of_their_images(
    tmp_path: Path,
) -> None:
    containers = build_images.BuildahCluster(tmp_path, [])
    assert containers.images.keys() == PROGRAMS.keys()
    targets = {"keys": "server", "sim": "server", "trainer": "trainer"}
    for name, target in targets.items():
        service = SERVICES[name]
        assert service["image"] == containers.images[target]
        host = containers.servers[0] if name == "sim" else name
        words = containers.command(host, ["program", "--option"])
        assert words[-4:] == [host, "--", "program", "--option"]
        mounted = [f"--volume={tmp_path}/{volume}" for volume in service["volumes"]]
        home = service.get("environment", {}).get("ENVSERVE_HOME")
        variables = [f"--env=ENVSERVE_HOME={home}"] if home else []
        assert [w for w in words if w[:5] in ("--vol", "--env")] == mounted + variables


def test_the_base_image_of_the_build_script_replaces_that_of_the_dockerfile() -> None:
    name = build_images.BASE_IMAGE.removeprefix("docker.io/library/")
    assert f"\nFROM {name} AS base\n" in (ROOT / "Dockerfile").read_text()
    assert f"--uid {build_images.USER}" in stages()["base"]


def test_the_image_creates_the_folder_of_the_runs_volume() -> None:
    volume, _, path = SERVICES["trainer"]["volumes"][-1].partition(":")
    assert volume == "runs"
    assert path in stages()["base"]


def test_rebuilding_an_image_after_an_edit_downloads_nothing() -> None:
    for target in PROGRAMS:
        before, _, after = stages()[target].partition("COPY envserve")
        assert "pip install --constraint" in before
        assert re.findall(r"pip install (.*) \.$", after, re.M) == [
            "--no-deps --no-build-isolation --force-reinstall"
        ]


def test_prometheus_scrapes_the_metrics_ports_of_the_services() -> None:
    file = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    jobs = yaml.safe_load(file.read_text())["scrape_configs"]
    scraped = {(d["names"][0], d["port"]) for j in jobs for d in j["dns_sd_configs"]}
    commands = {name: SERVICES[name]["command"] for name in ("sim", "trainer")}
    served = {
        (name, int(words[words.index("--metrics-port") + 1]))
        for name, words in commands.items()
    }
    assert scraped == served


def test_a_trainer_stands_still_only_if_it_takes_no_step_for_15_minutes() -> None:
    """Its counter of steps is also 0 while it starts."""
    file = ROOT / "deploy" / "prometheus" / "alerts.yml"
    (group,) = yaml.safe_load(file.read_text())["groups"]
    (rule,) = (each for each in group["rules"] if each["alert"] == "PpoStandsStill")
    (window,) = re.findall(r"\[(\d+)m\]", rule["expr"])
    assert int(window) + int(rule["for"].removesuffix("m")) == 15
    assert "for 15 minutes" in rule["annotations"]["summary"]


def test_the_systemd_unit_runs_an_existing_command_and_waits_for_its_drain() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy" / "systemd" / "envserve.service")
    service = unit["Service"]
    assert service["Type"] == "notify"
    program, command, *words = service["ExecStart"].replace("\\\n", "").split()
    assert Path(program).name == "envserve"
    parse("envserve", command, *words)
    grace = HostSettings().drain_grace_seconds
    assert grace + 1 < int(service["TimeoutStopSec"])
