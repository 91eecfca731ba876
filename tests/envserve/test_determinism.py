"""The same seed gives the same data, bit for bit, wherever the envs run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv

from .conftest import StartServer

NUM_ENVS = 16
NUM_STEPS = 2000


def draw_actions(batch: BatchEnv, generator: np.random.Generator) -> Any:
    (leaf,) = batch.spec.action_leaves
    if leaf.dtype.kind == "i":
        return generator.integers(0, 2, NUM_ENVS)
    return generator.uniform(-1, 1, (NUM_ENVS, *leaf.shape))


def digest_of_a_run(batch: BatchEnv) -> tuple[str, int]:
    """Returns a digest of all that 2,000 steps gave, and how many episodes ended."""
    digest = hashlib.sha256()
    generator = np.random.default_rng(7)
    episodes = 0
    with batch:
        digest.update(batch.reset().tobytes())
        for _ in range(NUM_STEPS):
            result = batch.step(draw_actions(batch, generator))
            assert result.valid.all()
            episodes += int((result.terminated | result.truncated).sum())
            for array in result[:-1]:
                digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest(), episodes


@pytest.mark.parametrize("env_name", ["CartPole-v1", "HalfCheetah-v5"])
def test_one_seed_gives_the_same_rows_wherever_the_envs_run(
    env_name: str, start_server: StartServer, tmp_path: Path
) -> None:
    batches: dict[str, Callable[[], BatchEnv]] = {
        "1 worker": lambda: BatchEnv.local(env_name, NUM_ENVS, 1, seed=5),
        "4 workers": lambda: BatchEnv.local(env_name, NUM_ENVS, 4, seed=5),
        "2 splits": lambda: BatchEnv.local(env_name, NUM_ENVS, 2, seed=5, num_splits=2),
        "ipc": lambda: BatchEnv.connect(
            env_name, [start_server(f"ipc://{tmp_path}/envs")], NUM_ENVS, seed=5
        ),
        "tcp": lambda: BatchEnv.connect(env_name, [start_server()], NUM_ENVS, seed=5),
        "two servers of 8": lambda: BatchEnv.connect(
            env_name, [start_server(), start_server()], NUM_ENVS, seed=5
        ),
    }
    digests = {where: digest_of_a_run(make()) for where, make in batches.items()}
    assert len(set(digests.values())) == 1, digests
    assert digests["1 worker"][1] >= NUM_ENVS, "no run crossed the end of an episode"


def test_one_seed_gives_the_same_rows_with_spare_envs_wherever_they_run(
    start_server: StartServer,
) -> None:
    env_name = "CartPole-v1"
    options: dict[str, Any] = {"seed": 5, "spare_envs": True}
    batches: dict[str, Callable[[], BatchEnv]] = {
        "1 worker": lambda: BatchEnv.local(env_name, NUM_ENVS, 1, **options),
        "16 workers": lambda: BatchEnv.local(env_name, NUM_ENVS, 16, **options),
        "2 splits": lambda: BatchEnv.local(
            env_name, NUM_ENVS, 2, num_splits=2, **options
        ),
        "two servers of 8": lambda: BatchEnv.connect(
            env_name, [start_server(), start_server()], NUM_ENVS, **options
        ),
    }
    digests = {where: digest_of_a_run(make()) for where, make in batches.items()}
    assert len(set(digests.values())) == 1, digests
    without = digest_of_a_run(BatchEnv.local(env_name, NUM_ENVS, 1, seed=5))
    assert digests["1 worker"] != without


def test_another_seed_gives_other_rows() -> None:
    observations = []
    for seed in (0, 1):
        with BatchEnv.local("CartPole-v1", 2, 1, seed=seed) as batch:
            observations.append(batch.reset())
    assert not np.array_equal(*observations)
