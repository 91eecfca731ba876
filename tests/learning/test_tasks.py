"""A task for each kind of space is learned in seconds."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppo.config import Config
from ppo.environments import env_maker
from ppo.evaluate import evaluate_run
from ppo.run_folder.folder import RunFolder
from ppo.train import train
from tests.learning import tasks

CONFIG = Config(
    env_name="set by each test",
    num_envs=16,
    horizon=32,
    total_steps=20 * 512,
    minibatch_size=128,
    epochs=5,
    learning_rate=3e-3,
    discount=0.0,  # no answer changes what is asked next
    evaluation_episodes=64,
    on_fault="raise",  # what is forbidden is an error of the env
    jit_compile=False,
)
IMAGES = {"total_steps": 12 * 512, "epochs": 4, "learning_rate": 2e-3}


@pytest.mark.parametrize(
    ("env_name", "changes"),
    [
        (tasks.CHOICES, {}),
        (tasks.BITS, {}),
        (tasks.MASKED, {}),
        (tasks.MASKED_CHOICES, {"env_kwargs": {"split": True}}),
        (tasks.IMAGE, IMAGES),
    ],
)
def test_a_policy_learns_the_task(
    env_name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = CONFIG.replace(env_name=env_name, **changes)
    run_folder = RunFolder.create(tmp_path / "run", config)
    make_env = env_maker(config, num_workers=1, import_modules=[tasks.__name__])
    train(config, run_folder, make_env)
    lines = (run_folder.path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[0]["mean_return"] < 0.65 * tasks.LENGTH
    # Acting and learning agree on what was allowed and seen.
    assert max(row["ratio_deviation"] for row in rows) < 1e-4
    evaluation = evaluate_run(config, run_folder, make_env)
    # 0.998 and more with seeds 0 to 2.
    assert evaluation.mean_return >= 0.95 * tasks.LENGTH
