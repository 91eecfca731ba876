"""The wrappers of a config are there wherever its envs are."""

from pathlib import Path

import numpy as np
import tensorflow as tf
from typer.testing import CliRunner

from ppo.cli import app
from ppo.config import Config
from ppo.environments import env_maker
from ppo.evaluate import evaluate_run
from ppo.export import export_run
from ppo.films.rendering import rendering_env_maker
from ppo.films.visualize import visualize_run
from ppo.run_folder.folder import RunFolder
from ppo.train import train
from tests.ppo.decode import read_video
from tests.ppo.film_env import NAME, read_frame

MODULES = ["tests.ppo.film_env"]
CONFIG = Config(
    env_name=NAME,  # episodes of 5 steps, observations float64 [2]
    wrappers=(
        {"name": "ActionRepeat", "amount": 2},
        {"name": "FrameHistory", "past_indices": [0, 1], "flatten": True},
        {"name": "DtypeObservation", "dtype": "float32"},
    ),
    num_envs=4,
    horizon=16,
    total_steps=128,
    epochs=1,
    minibatch_size=32,
    policy_layers=(8,),
    value_layers=(8,),
    evaluation_episodes=3,
    jit_compile=False,
)


def test_training_evaluation_films_and_exports_are_of_the_wrapped_env(
    tmp_path: Path,
) -> None:
    make_env = env_maker(CONFIG, num_workers=1, import_modules=MODULES)
    run_folder = RunFolder.create(tmp_path / "run", CONFIG)
    train(CONFIG, run_folder, make_env)
    run_folder, config = RunFolder.open(tmp_path / "run")
    assert config == CONFIG

    evaluation = evaluate_run(config, run_folder, make_env)
    assert evaluation.lengths.tolist() == [3, 3, 3]  # of 2, 2 and 1 steps

    make_rendering_env = rendering_env_maker(config, import_modules=MODULES)
    visualize_run(
        config, run_folder, make_rendering_env, tmp_path / "films", episodes=1
    )
    film = min((tmp_path / "films").glob("*.mp4"))
    steps = [read_frame(frame)[1] for frame in read_video(film, 36, 50)]
    assert steps == [0, 2, 4, 5]

    export_run(config, run_folder, make_env, tmp_path / "policy")
    policy = tf.saved_model.load(str(tmp_path / "policy"))
    assert policy.mode(np.zeros((7, 4), np.float32)).shape == (7, 1)


def test_wrong_wrappers_end_the_command_with_what_to_do(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    setting = 'wrappers=[{name = "ActionRepeat", amount = 0}]'
    arguments = ["train", "pendulum", "--set", setting, "--run-dir", folder]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "amount: expected an int from 1 to 1000; got 0" in result.output
