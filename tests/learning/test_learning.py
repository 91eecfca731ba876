"""The short form of `scripts/check_learning.py`: one seed of CartPole is learned."""

from pathlib import Path

import pytest

from ppo.configs import CONFIGS
from ppo.environments import env_maker
from ppo.evaluate import evaluate_run
from ppo.run_folder import RunFolder
from ppo.train import train


@pytest.mark.timeout(180)
def test_cartpole_is_learned_in_80_000_steps(tmp_path: Path) -> None:
    config = CONFIGS["cartpole"].replace(total_steps=80_000)
    run_folder = RunFolder.create(tmp_path / "run", config)
    make_env = env_maker(config, num_workers=2)
    result = train(config, run_folder, make_env)
    evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    assert len(evaluation.returns) == 100
    assert evaluation.mean_return >= 475
