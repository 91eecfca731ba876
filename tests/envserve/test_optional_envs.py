"""Workers build and step the envs of the optional extras.

These envs cannot run in this process, where warnings are errors, because box2d's
module crashes if its warning raises.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from envserve.client import BatchEnv

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def extra_has_packages(extra: str) -> bool:
    lines = PROJECT["optional-dependencies"][extra]
    markers = [Requirement(line).marker for line in lines]
    return all(marker is None or marker.evaluate() for marker in markers)


@pytest.mark.skipif(
    not extra_has_packages("box2d"),
    reason="the machine lacks a platform or Python that box2d has wheels for",
)
def test_a_box2d_env_is_stepped() -> None:
    with BatchEnv.local("LunarLander-v3", 2, num_workers=1, seed=0) as env:
        first = env.reset()
        assert first.shape == (2, 8)
        (action,) = env.spec.action_leaves
        step = env.step(np.zeros((2, *action.shape), action.dtype))
        assert step.valid.all()
        assert not np.array_equal(step.observation, first)


def test_an_atari_game_is_stepped_without_a_download() -> None:
    with BatchEnv.local(
        "ALE/Pong-v5", 2, num_workers=1, seed=0, import_modules=["ale_py"]
    ) as env:
        first = env.reset()
        assert (first.dtype, first.shape) == (np.uint8, (2, 210, 160, 3))
        for _ in range(20):
            step = env.step(np.array([1, 3]))
            assert step.valid.all()
        assert not np.array_equal(step.observation, first)


def test_atari_games_are_preprocessed() -> None:
    wrappers = [
        {"name": "AtariPreprocessing", "noop_max": 5, "screen_size": 42},
        {"name": "FrameStackObservation", "stack_size": 4},
    ]
    frames = []
    for _ in range(2):
        with BatchEnv.local(
            *("PongNoFrameskip-v4", 2, 1),
            seed=0,
            import_modules=["ale_py"],
            wrappers=wrappers,
        ) as env:
            env.reset()
            step = env.step(np.array([2, 3]))
            assert step.valid.all()
            frames.append(np.array(step.observation))
    first, second = frames
    assert first.dtype == np.uint8
    assert first.shape == (2, 4, 42, 42)
    assert np.ptp(first) > 100
    np.testing.assert_array_equal(first, second)
