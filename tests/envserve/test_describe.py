"""`envserve describe` for local envs and for a server's envs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from envserve.cli.app import PROGRAM
from envserve.client import BatchEnv
from envserve.errors import EnvserveError
from tests.command_line import invoke
from tests.envserve.conftest import Serve

USER_ENV = """
import time
import gymnasium
from gymnasium import spaces

class Described(gymnasium.Env):
    observation_space = spaces.Dict({"[red]x": spaces.Box(-1, 1, (2,))})
    action_space = spaces.Discrete(3)
    metadata = {"render_modes": ["ansi"]}

    def __init__(self, length: int, wind=0.5, *, render_mode=None):
        if not length:
            raise ValueError("too short to walk")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}

class FirstStepIsSlow(Described):
    def __init__(self):
        self.delays = [0.6]

    def step(self, action):
        while self.delays:
            time.sleep(self.delays.pop())
        return super().step(action)

gymnasium.register("Described-v2", "not_installed.envs:Described")
for name, length in (("Described-v0", 7), ("Described-v1", 0)):
    gymnasium.register(name, Described, max_episode_steps=20, kwargs={"length": length})
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("user_envs") / "envs_to_describe.py"
    file.write_text(USER_ENV)
    before, path = [*gymnasium.registry], [*sys.path]
    yield str(file)
    sys.path[:] = path
    sys.modules.pop(file.stem, None)
    for name in gymnasium.registry.keys() - before:
        del gymnasium.registry[name]


def described(*words: str) -> dict[str, str]:
    result = invoke(PROGRAM, ["describe", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    lines = (line.split("  ", 1) for line in result.output.splitlines())
    return {name.strip(): value.strip() for name, value in lines}


def test_a_name_without_a_version_means_the_latest_version() -> None:
    with pytest.warns(UserWarning, match="which is CartPole-v1"):
        assert described("CartPole")["time limit"] == "500"


def test_describe_prints_the_same_for_a_local_and_a_remote_env(
    serve: Serve, file: str
) -> None:
    found = described(f"{file}:Described-v0")
    assert found.pop("steps/s").endswith(" of one env in a worker")
    assert found.pop("time limit") == "20"
    assert found.pop("arguments") == "length=7, wind=0.5, render_mode=None"
    assert found == {
        "observation": "Dict('[red]x': Box(-1.0, 1.0, (2,), float32))",
        "action": "Discrete(3)",
        "render modes": "ansi",
    }
    there = described("Described-v0", serve(file, imports=()).address)
    assert float(there.pop("steps/s").split()[0].replace(",", "")) > 0
    assert there == found


def test_the_speed_excludes_the_first_step(file: str) -> None:
    speed = described(f"{file}:FirstStepIsSlow")["steps/s"]
    assert float(speed.split()[0].replace(",", "")) > 2


def test_describing_an_env_that_cannot_be_built_fails(file: str) -> None:
    for word, text in (
        ("CartPoll-v1", "CartPole-v1"),
        (f"{file}:Described-v1", "too short"),
    ):
        result = invoke(PROGRAM, ["describe", word])
        assert result.exit_code == 2
        assert result.output.startswith("Error: ")
        assert text in result.output


def test_an_env_with_a_missing_package_is_reported_without_a_traceback(
    file: str,
) -> None:
    result = invoke(PROGRAM, ["describe", "Described-v2", "--import", file])
    assert result.exit_code == 2
    assert "not_installed" in result.output
    assert "Traceback" not in result.output


INVALID = """
import gymnasium
import numpy as np

class Shape(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

class NoSpace(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))

class Unbuilt(Shape):
    def __init__(self):
        raise RuntimeError("no engine")

class Step(Shape):
    def reset(self, **given):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        raise RuntimeError("no step")
"""


def test_an_env_that_cannot_be_built_or_stepped_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "unbuilt_envs.py"
    file.write_text(INVALID)
    for command in ("describe", "bench"):
        words = [f"{file}:Unbuilt", *["--env"] * (command == "bench")][::-1]
        result = invoke(PROGRAM, [command, *words])
        assert result.exit_code == 2
        assert "RuntimeError: no engine" in result.stderr.splitlines()[-1]
    result = invoke(PROGRAM, ["describe", f"{file}:Step"])
    assert (result.exit_code, result.stdout) == (1, "")
    *_, line = result.stderr.splitlines()
    assert "every step has failed, also in 1 new worker process: RuntimeErr" in line


def test_an_invalid_env_is_an_error_that_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "invalid_envs.py"
    file.write_text(INVALID)
    result = invoke(PROGRAM, ["describe", f"{file}:NoSpace"])
    assert "attribute action_space; NoSpace has none; set it" in result.output
    crashes = str(tmp_path / "crashes")
    with (
        pytest.raises(EnvserveError, match="expected observation float32"),
        BatchEnv.local(f"{file}:Shape", 1, crash_dir=crashes) as batch,
    ):
        batch.reset()
    (repro,) = (tmp_path / "crashes").glob("*.repro")
    result = invoke(PROGRAM, ["replay", str(repro), "--import", f"{file}:Shape"])
    assert result.exit_code == 0, result.output
    assert "reproduced in the reset: expected observation float32" in result.output
