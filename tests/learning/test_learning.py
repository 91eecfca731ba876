"""Named configs reach their target returns; policies learn in every kind of space."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppo.cli.app import main
from ppo.config import Config
from ppo.config.named_configs import CONFIGS, recommended_settings
from ppo.environments import env_maker
from ppo.evaluation.evaluate import evaluate_run
from ppo.run_folder.folder import RunFolder
from ppo.train import train
from tests.learning import tasks
from tests.ppo import cluster
from tests.ppo.runs import rows_of

CONFIG = Config(
    env_name="set by each test",
    num_envs=16,
    horizon=32,
    total_steps=20 * 512,
    minibatch_size=128,
    epochs=5,
    learning_rate=3e-3,
    discount=0.0,  # actions do not affect later observations
    evaluation_episodes=64,
    on_fault="raise",  # envs raise if an action is not allowed
    jit_compile=False,  # compiling would take longer than training
)
IMAGES = {"total_steps": 12 * 512, "epochs": 4, "learning_rate": 2e-3}
RECALL = CONFIG.replace(
    env_name="learning-tests/Recall-v0",
    total_steps=6_400,
    horizon=20,
    minibatch_size=80,
    epochs=4,
    discount=0.9,
    evaluation_episodes=100,
    recurrent_size=16,
    policy_layers=(16,),
    value_layers=(16,),
)

pytestmark = pytest.mark.timeout(500)


def learned_return(folder: Path, config: Config, num_workers: int = 1) -> float:
    """Train, then return the mean return of an evaluation."""
    run_folder = RunFolder.create(folder, config)
    make_env = env_maker(config, None, num_workers, [tasks.__name__])
    train(config, run_folder, make_env)
    evaluation = evaluate_run(config, run_folder, make_env)
    assert len(evaluation.returns) == config.evaluation_episodes
    return evaluation.mean_return


def test_cartpole_is_learned_in_80_000_steps(tmp_path: Path) -> None:
    config = CONFIGS["cartpole"].replace(total_steps=80_000)
    assert learned_return(tmp_path / "run", config, num_workers=2) >= 475


def test_cartpole_is_learned_while_rows_do_not_wait_for_stalls(tmp_path: Path) -> None:
    config = CONFIGS["cartpole"].replace(
        env_name="learning-tests/StallingCartPole-v0", act_on=0.25, num_splits=1
    )
    assert learned_return(tmp_path / "run", config, num_workers=8) >= 475


def test_two_learners_learn_cartpole_in_80_000_steps(tmp_path: Path) -> None:
    settings = ("--set", "total_steps=80000", "--distribute", "--num-workers=1")
    other = ("train", "cartpole", *settings)
    first = (*other, "--run-dir", str(tmp_path / "run"))
    codes = cluster.exit_codes(main, [[first], [other]], tmp_path, 450)
    assert codes == [0, 0], cluster.outputs(tmp_path)
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluation["mean_return"] >= 475


# Random actions have a return of -1,200.
@pytest.mark.parametrize("objective", ["clip", "penalty"])
def test_pendulum_is_learned_in_100_000_steps(tmp_path: Path, objective: str) -> None:
    config = CONFIGS["pendulum"].replace(total_steps=100_000, objective=objective)
    assert learned_return(tmp_path / "run", config, num_workers=2) >= -300


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Choices", {}),
        ("Bits", {}),
        ("Masked", {}),
        ("MaskedChoices", {"env_kwargs": {"split": True}}),
        ("Image", IMAGES),
    ],
)
def test_policies_learn_with_each_kind_of_space(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = CONFIG.replace(env_name=f"learning-tests/{name}-v0", **changes)
    # Seeds 0 to 2 reach at least 0.998.
    assert learned_return(tmp_path / "run", config) >= 0.95 * tasks.LENGTH
    rows = rows_of(tmp_path / "run")
    assert rows[0]["mean_return"] < 0.65 * tasks.LENGTH
    # Acting and learning use the same observations and masks.
    assert max(row["ratio_deviation"] for row in rows) < 1e-4


# After 60,000 steps, the last 100 training episodes returned 6.2 (seed 0); without the
# hidden layers, no policy is better than 4.
def test_numbers_beside_an_image_are_combined_with_the_settings_for_images(
    tmp_path: Path,
) -> None:
    task = tasks.XorTask()
    suited = recommended_settings(task.observation_space, task.action_space)
    config = Config(env_name="learning-tests/Xor-v0", **suited)
    config = config.replace(total_steps=60_000, evaluation_episodes=64)
    assert learned_return(tmp_path / "run", config) >= 6.0


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({}, 0.9, 1.0),
        # Without recurrence, the best possible return is 0.5.
        ({"recurrent_size": 0}, 0.0, 0.7),
        # With continuous actions, the best guess has a return of 0.
        ({"total_steps": 9_600, "env_kwargs": {"is_discrete": False}}, 0.8, 1.0),
    ],
)
def test_only_a_recurrent_policy_recalls_a_cue(
    changes: dict[str, Any], low: float, high: float, tmp_path: Path
) -> None:
    config = RECALL.replace(**changes)
    assert low <= learned_return(tmp_path / "run", config) <= high
