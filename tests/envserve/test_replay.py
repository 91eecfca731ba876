"""Replaying a repro file reproduces the crash: the same fault at the same action."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.crashes.action_ring import ActionHistory
from envserve.crashes.crash_folder import SUFFIX
from envserve.crashes.repro_file import End, Repro, decode_repro, encode_repro
from envserve.errors import ReproError
from envserve.lane import Reset
from envserve.pool.launcher import Launcher
from envserve.pool.pool import Pool
from envserve.pool.replay import describe_repro, load_repro, replay
from envserve.slab import Status
from envserve.spaces import codec
from envserve.wrappers.specs import WrapperSpec

from .pool_driver import FAULTY, PoolMaker, gather, launcher_with, reset

CRASHY_ENVS = '''
import ctypes, os, signal, time
import gymnasium, numpy as np

def fall():
    raise RuntimeError("lost its balance")

FAULTS = {
    "raise": fall,
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
    "nan": lambda: np.array([np.nan]),
}

class CrashyEnv(gymnasium.Env):
    """A random walk that crashes at random, in a step or a reset."""

    def __init__(self, fault, chance=0.02):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
        self.fault = FAULTS[fault]
        self.chance = chance

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        doom = (options or {}).get("doom")
        if doom == "reset":
            self.fault()
        if doom == "step":
            self.chance = 1.0
        self.place = np.float64(0)
        self.left = self.np_random.integers(1, 40)
        return self.look(0.1 if seed is None else 0), {}

    def step(self, action):
        self.place += self.np_random.normal() + action.sum()
        self.left -= 1
        return self.look(self.chance), 0.0, bool(self.left <= 0), False, {}

    def look(self, chance):
        if self.np_random.random() < chance:
            found = self.fault()
            if found is not None:
                return found.astype(np.float32)
        return np.array([self.place], np.float32)

gymnasium.register("crashy_envs/Crashy-v0", "crashy_envs:CrashyEnv")
'''
CRASHY = "crashy_envs/Crashy-v0"
WRAPPERS = (
    WrapperSpec("RandomStart", {"max_steps": 5}),
    WrapperSpec("ActionRepeat", {"amount": 2}),
    WrapperSpec("FrameHistory", {"past_indices": [0, 3]}),
)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    folder = tmp_path_factory.mktemp("modules")
    with launcher_with(folder, crashy_envs=CRASHY_ENVS) as launcher:
        yield launcher


@pytest.fixture
def crash_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Every fault writes a file, including those that equal the previous fault.
    monkeypatch.setattr("envserve.crashes.crash_folder._INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr("envserve.text.LOG_INTERVAL", 0.0)
    return tmp_path / "crashes"


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}")) if folder.exists() else []


def crash(
    pool: Pool, folder: Path, generator: np.random.Generator, num_files: int
) -> list[Path]:
    """Step with random actions until there are `num_files` repro files."""
    reset(pool)
    while len(files_in(folder)) < num_files:
        for array in pool.rows.action:
            array[:] = generator.uniform(-1, 1, array.shape)
        pool.submit_step(range(len(pool.blocks)))
        gather(pool, range(len(pool.blocks)))
    return files_in(folder)


@pytest.mark.parametrize(
    ("fault", "num_crashes", "options"),
    [
        ("raise", 4, {}),
        ("nan", 3, {}),
        ("nan", 3, {"nonfinite": "mask"}),
        ("exit", 3, {"autoreset": "next_step", "seeded": False}),
        ("segfault", 3, {"num_splits": 2}),
        ("abort", 3, {"spare_envs": True}),
        ("raise", 3, {"spare_envs": True}),
        ("raise", 3, {"wrappers": WRAPPERS[1:]}),
        ("exit", 3, {"wrappers": WRAPPERS}),
        ("exit", 2, {"wrappers": WRAPPERS, "spare_envs": True}),
        ("kill", 4, {"first_env_index": 5, "first_incarnation": 2}),
        ("hang", 1, {"step_timeout_seconds": 4.0, "reset_timeout_seconds": 4.0}),
    ],
)
def test_random_crashes_are_reproduced_at_the_same_action(
    make_pool: PoolMaker,
    launcher: Launcher,
    crash_dir: Path,
    random_generator: np.random.Generator,
    fault: str,
    num_crashes: int,
    options: dict[str, Any],
) -> None:
    pool = make_pool(
        CRASHY, 4, 2, env_kwargs={"fault": fault}, crash_dir=str(crash_dir), **options
    )
    for path in crash(pool, crash_dir, random_generator, num_crashes):
        repro = load_repro(path)
        assert repro.env_name == CRASHY
        timeout = 5.0 if fault == "hang" else None
        ending = replay(repro, launcher, timeout)
        assert ending.is_reproduced, (ending, describe_repro(repro))


@pytest.mark.parametrize("doom", ["reset", "step"])
def test_a_crash_caused_by_reset_options_is_reproduced(
    make_pool: PoolMaker, launcher: Launcher, crash_dir: Path, doom: str
) -> None:
    kwargs = {"fault": "raise", "chance": 0.0}
    pool = make_pool(CRASHY, 2, 1, env_kwargs=kwargs, crash_dir=str(crash_dir))
    reset(pool)
    doomed = Reset(0, (1,), options=codec.encode({"doom": doom}))
    (outcome,) = reset(pool, doomed)
    assert (outcome.error is not None) is (doom == "reset")
    pool.submit_step([0])
    gather(pool, [0])
    if doom == "reset":  # the caller gets the error instead of a repro file
        assert not files_in(crash_dir)
        return
    (path,) = files_in(crash_dir)
    repro = load_repro(path)
    assert repro.env_index == 1
    ending = replay(repro, launcher)
    assert ending.is_reproduced, (ending, describe_repro(repro))
    assert ending.text.startswith("in action 1:")
    played = replace(repro.played, options=b"", misses_options=True)
    forgetful = replace(repro, played=played)
    assert "options of this reset or an earlier one" in describe_repro(forgetful)
    assert not replay(forgetful, launcher).is_reproduced


def make_repro(fault: str = "segfault", **changes: Any) -> Repro:
    played = ActionHistory(
        incarnation=0,
        seed=3,
        generator=None,
        actions=(np.array([0, 0, 1], np.int64),),
        num_missing=0,
        episode_step=3,
        is_touched=False,
    )
    repro = Repro(
        env_name=FAULTY,
        env_kwargs={"fault": fault},
        import_modules=("tests.oracle.probe_envs",),
        autoreset="same_step",
        root_seed=1,
        seeded=True,
        env_index=0,
        timeout_seconds=20.0,
        played=played,
        end=End(status=Status.WORKER_DIED, text="was killed", exit_code=-11),
    )
    return replace(repro, **changes)


@pytest.mark.parametrize(
    ("repro", "text"),
    [
        (make_repro("exit"), "in action 3: exited with code 3"),
        (make_repro("raise"), "lost its balance"),
        (make_repro("none"), "did not crash in 3 actions"),
        (make_repro("raise_in_init"), "no simulator licence"),
        (make_repro("exit_in_init"), "before the reset: exited with code 7"),
        (make_repro("raise_in_reset"), "in the reset: "),
        (make_repro(env_name="no_such/Env-v0"), "no env named 'no_such/Env-v0'"),
        (make_repro(env_name="os:system"), "no env named 'os:system'"),
        (make_repro(env_kwargs={"fault": "exit", "odd": 1}), "unexpected keyword"),
        (
            make_repro(wrappers=(WrapperSpec("os:system"),)),
            "could not be replayed: wrappers[0]: no wrapper named 'os:system' is known",
        ),
        (
            make_repro(wrappers=(WrapperSpec("FrameHistory"),)),
            "could not be replayed: wrappers[0] (FrameHistory): missing argument",
        ),
        (
            make_repro(env_name="crashy_envs/Crashy-v0"),
            "expected actions of crashy_envs/Crashy-v0",
        ),
        (
            make_repro(end=End(status=Status.WORKER_DIED, text="", exit_code=-6)),
            "in action 3: was killed by SIGSEGV",
        ),
        (
            make_repro("raise", end=End(status=Status.ENV_ERROR, text="ValueError: x")),
            "lost its balance",
        ),
        (
            make_repro("nan", end=End(status=Status.ENV_ERROR, text="ValueError: x")),
            "expected observation to be finite",
        ),
    ],
)
def test_a_different_end_is_not_a_reproduction(
    launcher: Launcher, repro: Repro, text: str
) -> None:
    ending = replay(repro, launcher)
    assert not ending.is_reproduced
    assert text in ending.text


def test_the_same_end_at_an_earlier_action_is_not_a_reproduction(
    launcher: Launcher,
) -> None:
    repro = make_repro()
    assert replay(repro, launcher).is_reproduced
    longer = (np.array([0, 1, 0], np.int64),)
    repro = replace(repro, played=replace(repro.played, actions=longer))
    ending = replay(repro, launcher)
    assert not ending.is_reproduced
    assert ending.text.startswith("in action 2:")


def test_reasons_why_a_replay_may_differ_are_described() -> None:
    assert "may end differently" not in describe_repro(make_repro())
    played = replace(make_repro().played, seed=None, num_missing=1, is_touched=True)
    text = describe_repro(make_repro(played=played))
    assert "1 action before these are not recorded" in text
    assert "its random numbers are not" in text
    assert "attribute assignments are not recorded" in text


# Files from untrusted sources.


def test_a_description_contains_no_control_characters() -> None:
    rude = "\x1b]0;owned\x07\x1b[2J"
    end = End(status=Status.ENV_ERROR, text=rude)
    text = describe_repro(make_repro(env_name=rude, end=end))
    assert all(line.isprintable() for line in text.splitlines())
    assert "owned" in text


def test_file_is_decoded_as_it_was_encoded() -> None:
    repro = make_repro(played=replace(make_repro().played, generator=(1,) * 6))
    again = decode_repro(encode_repro(repro))
    assert again.played.actions[0].tolist() == [0, 0, 1]
    empty = replace(repro.played, actions=())
    assert replace(again, played=replace(again.played, actions=())) == replace(
        repro, played=empty
    )


def test_wrappers_are_described() -> None:
    plain, wrapped = make_repro(), make_repro(wrappers=WRAPPERS)
    assert decode_repro(encode_repro(wrapped)).wrappers == WRAPPERS
    said = "env 0 of envserve/Faulty-v0 in RandomStart(max_steps=5), ActionRepeat("
    assert said in describe_repro(wrapped)
    assert " in " not in describe_repro(plain).splitlines()[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"wrappers": [["ActionRepeat", 4]]},
        {"env_name": 7},
        {"env_kwargs": [1]},
        {"autoreset": "never"},
        {"root_seed": -1},
        {"env_index": True},
        {"timeout_seconds": "soon"},
        {"timeout_seconds": float("nan")},
        {"played": None},
        {"end": {}},
        {"played.seed": -1},
        {"played.seed": 2**63},
        {"played.generator": [1, 2, 3]},
        {"played.generator": [2**64 - 1, 0, 0, 0, 0, -1]},
        {"played.actions": []},
        {"played.actions": [1]},
        {"played.actions": [np.zeros(2), np.zeros(3)]},
        {"played.actions": [np.zeros(())]},
        {"played.num_missing": 0.5},
        {"played": np.zeros(2)},
        {"env_kwargs": np.zeros(2)},
    ],
    ids=str,
)
def test_files_with_invalid_values_are_rejected(changes: dict[str, Any]) -> None:
    value = codec.decode(encode_repro(make_repro()))
    for name, odd in changes.items():
        *outer, inner = name.split(".")
        (value[outer[0]] if outer else value)[inner] = odd
    with pytest.raises(ReproError):
        decode_repro(codec.encode(value))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\xc1", b"rubbish" * 100, codec.encode(np.zeros(2)), b"\xa6format"],
)
def test_files_that_are_not_repro_files_are_rejected(
    tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "file").write_bytes(data)
    file = tmp_path / "file"
    with pytest.raises(ReproError, match=f"{file}: not an envserve repro file: "):
        load_repro(file)
    for path, text in ((tmp_path / "none", "No such file"), (tmp_path, "Is a dir")):
        with pytest.raises(
            ReproError, match=f"{path}: cannot read the repro file: {text}"
        ):
            load_repro(path)


# The command.


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "envserve", "replay", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_command_prints_whether_the_crash_is_reproduced(tmp_path: Path) -> None:
    path = tmp_path / "a.repro"
    path.write_bytes(encode_repro(make_repro()))
    result = run(str(path), "--import", "tests.oracle.probe_envs")
    assert result.returncode == 0, result.stderr
    assert "a reset with seed 3, then 3 actions" in result.stdout
    assert "\nreproduced in action 3: was killed by SIGSEGV" in result.stdout
    assert "\nFatal Python error: Segmentation fault\n" in result.stdout
    assert result.stderr == ""
    result = run(str(path))  # fails, because the env is not registered
    assert result.returncode == 1
    assert "not reproduced: could not be replayed: no env named" in result.stdout
    assert "in a process that imported tests.oracle.probe_envs" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["no_such_file", "."])
def test_command_without_a_file_ends_with_a_short_error(name: str) -> None:
    result = run(name)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
