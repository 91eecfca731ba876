"""Training on real worker processes, one of which dies on the way."""

import json
from pathlib import Path

from ppo.config import Config
from ppo.environments import env_maker
from ppo.evaluate import evaluate_run
from ppo.run_folder.folder import RunFolder
from ppo.train import train
from tests.ppo.exit_once import NAME


def test_a_worker_that_dies_costs_its_rows_and_nothing_else(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    config = Config(
        env_name=NAME,
        env_kwargs={"marker": str(marker)},
        num_envs=4,
        horizon=32,
        total_steps=512,
        epochs=2,
        minibatch_size=32,
        policy_layers=(8,),
        value_layers=(8,),
        evaluation_episodes=3,
        jit_compile=False,
    )
    make_env = env_maker(config, num_workers=2, import_modules=["tests.ppo.exit_once"])
    run_folder = RunFolder.create(tmp_path / "run", config)
    result = train(config, run_folder, make_env)
    assert result.is_finished
    assert not marker.exists()
    lines = (run_folder.path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    lost = sum(row["invalid_steps"] for row in rows)
    assert lost >= 1
    assert result.steps == 512 - lost
    assert all(row["ratio_deviation"] < 1e-5 for row in rows)
    # Only complete episodes are reported, and those have 15 steps.
    assert rows[-1]["mean_length"] == 15.0
    evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    assert evaluation.lengths.tolist() == [15, 15, 15]
