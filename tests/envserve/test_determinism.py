"""The same seed yields bit-identical data wherever the envs run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv

from .conftest import servers_in

pytestmark = pytest.mark.usefixtures("one_launcher")

NUM_ENVS = 16
NUM_STEPS = 90
#: HalfCheetah episodes end only at the step limit.
LIMIT = {"name": "TimeLimit", "max_episode_steps": 40}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Start two servers over TCP, and one over a Unix socket."""
    folder = tmp_path_factory.mktemp("servers")
    with servers_in(folder) as start:
        yield [start(), start(), start(f"ipc://{folder}/envs")]


def draw_actions(batch: BatchEnv, generator: np.random.Generator) -> Any:
    (leaf,) = batch.spec.action_leaves
    if leaf.dtype.kind == "i":
        return generator.integers(0, 2, NUM_ENVS)
    return generator.uniform(-1, 1, (NUM_ENVS, *leaf.shape))


def digest_of_a_run(batch: BatchEnv) -> tuple[str, int]:
    """Return a digest of all results, and the number of finished episodes."""
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


@pytest.mark.parametrize(
    ("env_name", "spare_envs"), [("CartPole-v1", True), ("HalfCheetah-v5", False)]
)
def test_the_same_seed_returns_the_same_rows_wherever_the_envs_run(
    env_name: str, spare_envs: bool, servers: list[str]
) -> None:
    def local(num_workers: int, **more: Any) -> BatchEnv:
        return BatchEnv.local(env_name, NUM_ENVS, num_workers, **options, **more)

    def connect(*addresses: str) -> BatchEnv:
        return BatchEnv.connect(env_name, addresses, NUM_ENVS, **options)

    first, second, ipc = servers
    options: dict[str, Any] = {"seed": 5, "spare_envs": spare_envs, "wrappers": [LIMIT]}
    batches: dict[str, Callable[[], BatchEnv]] = {
        "1 worker": lambda: local(1),
        "2 splits": lambda: local(2, num_splits=2),
        "two servers of 8": lambda: connect(first, second),
    }
    if spare_envs:
        batches["16 workers"] = lambda: local(16)
    else:
        batches["4 workers"] = lambda: local(4)
        batches["ipc"] = lambda: connect(ipc)
    digests = {where: digest_of_a_run(make()) for where, make in batches.items()}
    assert len(set(digests.values())) == 1, digests
    assert digests["1 worker"][1] >= NUM_ENVS, "expected a finished episode per env"
    if spare_envs:
        options["spare_envs"] = False
        assert digest_of_a_run(local(1)) != digests["1 worker"]


def test_another_seed_returns_other_rows() -> None:
    observations = []
    for seed in (0, 1):
        with BatchEnv.local("CartPole-v1", 2, 1, seed=seed) as batch:
            observations.append(batch.reset())
    assert not np.array_equal(*observations)
