"""What was seen once and is gone can be learned from, by recurrent policies only."""

from pathlib import Path

import pytest

from ppo.config import Config
from ppo.environments import env_maker
from ppo.evaluate import evaluate_run
from ppo.run_folder.folder import RunFolder
from ppo.train import train
from tests.learning.recall_env import NAME

CONFIG = Config(
    env_name=NAME,
    total_steps=6_400,
    num_envs=16,
    horizon=20,
    minibatch_size=80,
    epochs=4,
    learning_rate=3e-3,
    discount=0.9,
    recurrent_size=16,
    policy_layers=(16,),
    value_layers=(16,),
    jit_compile=False,  # compiling takes longer than so few steps
)


def learned_return(folder: Path, config: Config) -> float:
    run_folder = RunFolder.create(folder / "run", config)
    make_env = env_maker(
        config, num_workers=1, import_modules=["tests.learning.recall_env"]
    )
    result = train(config, run_folder, make_env)
    return evaluate_run(config, run_folder, make_env, result.agent).mean_return


@pytest.mark.timeout(180)
def test_a_cue_is_recalled_by_choosing(tmp_path: Path) -> None:
    assert learned_return(tmp_path, CONFIG) >= 0.9


@pytest.mark.timeout(180)
def test_without_memory_the_cue_is_guessed(tmp_path: Path) -> None:
    # At the end all observations are the same, and 0.5 is the best there is.
    config = CONFIG.replace(recurrent_size=0)
    assert learned_return(tmp_path, config) <= 0.7


@pytest.mark.timeout(180)
def test_a_cue_is_recalled_by_a_number(tmp_path: Path) -> None:
    config = CONFIG.replace(total_steps=9_600, env_kwargs={"is_discrete": False})
    # The best guess is worth 0.
    assert learned_return(tmp_path, config) >= 0.8
