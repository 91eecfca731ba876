"""Videos of agents: complete episodes, with the settings of the run."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.errors import VideoError
from envserve.text import install_command, rounded
from ppo.agent.agent import Agent
from ppo.config import Config
from ppo.environments import env_maker
from ppo.errors import CheckpointError, EnvDataError, EnvsLostError, OutputError
from ppo.evaluation.evaluate import evaluate, evaluation_seed
from ppo.evaluation.rendering import rendering_env_maker
from ppo.evaluation.videos import visualize_run
from ppo.run_folder import checkpoint
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.trust import EnvSource
from tests.envserve.server_process import ServerProcess
from tests.ppo.film_env import (
    MASKED,
    NAME,
    WITHOUT_ARGUMENTS,
    WITHOUT_RENDER_MODE,
    read_frame,
    read_video,
)
from tests.ppo.runs import ppo, save_run

pytestmark = pytest.mark.usefixtures("one_launcher")

MODULES = ["tests.ppo.film_env"]
CONFIG = Config(env_name=NAME, policy_layers=(8,), value_layers=(8,), num_envs=4)


def visualize(folder: Path, config: Config = CONFIG, **named: Any) -> np.ndarray:
    """Record a run, creating it if necessary; return the episodes' returns."""
    if not folder.exists():
        save_run(folder, config)
    run_folder, config = RunFolder.open(folder)
    make_env = rendering_env_maker(config, import_modules=MODULES)
    outdir = folder / "films"
    named = {"episodes": 1, **named}
    return visualize_run(config, run_folder, make_env, outdir, **named).returns


def films(folder: Path) -> list[list[tuple[int, int]]]:
    """Return the (episode, step) of all frames of each video."""
    return [
        [read_frame(frame) for frame in read_video(path, 36, 50)]
        for path in sorted(folder.glob("*.mp4"))
    ]


def test_ppo_visualize_records_complete_episodes_of_a_run_that_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = CONFIG.replace(env_kwargs={"length": 4}, spare_envs=True)
    save_run(tmp_path / "made", config, iterations=(1, 2))
    (tmp_path / "made").rename(tmp_path / "moved")
    (tmp_path / "moved" / "films").symlink_to(tmp_path)  # not used with --outdir
    outdir = Path("10:30", "films")  # to ffmpeg, "10:" looks like a protocol
    code, output, error = ppo(
        *("visualize", tmp_path / "moved", "--outdir", outdir, "--episodes", 3),
        *("--checkpoint", 100, "--import", *MODULES),
    )
    assert code == 0, error
    # The last frame is the final state, not the first state of the next episode.
    assert films(outdir.absolute()) == [
        [(episode, step) for step in range(5)] for episode in range(3)
    ]
    summary = json.loads((outdir / "step-100.json").read_text())
    assert summary["env_name"] == NAME
    assert summary["steps"] == 100
    assert summary["lengths"] == [4, 4, 4]
    assert summary["videos"] == [f"step-100-episode-{k}.mp4" for k in (1, 2, 3)]
    assert all((outdir / name).is_file() for name in summary["videos"])
    returns = np.array(summary["returns"])
    assert summary["std_return"] == pytest.approx(returns.std())
    (events,) = (tmp_path / "moved" / "tensorboard").iterdir()
    for part in (b"evaluation/film", b"GIF89a"):
        assert part in events.read_bytes()
    start, *lines = output.splitlines()
    assert start == "starting TensorFlow ..."
    assert len(lines) == 4
    for line, earned in zip(lines, returns, strict=False):
        assert f"return {rounded(earned)}, 4 steps" in line
    assert lines[3] == (
        f"Mean return {rounded(returns.mean())}, "
        f"standard deviation {rounded(returns.std())}, over 3 episodes"
    )


@pytest.mark.parametrize("recurrent_size", [0, 4])
def test_videos_show_the_episodes_of_the_evaluation(
    tmp_path: Path, recurrent_size: int
) -> None:
    config = CONFIG.replace(recurrent_size=recurrent_size, minibatch_size=128)
    filmed = visualize(tmp_path / "run", config, episodes=3)
    run_folder, config = RunFolder.open(tmp_path / "run")
    make_env = env_maker(config, num_workers=1, import_modules=MODULES)
    with make_env(num_envs=1, seed=evaluation_seed(config.seed)) as env:
        agent = Agent(env.observation_space, env.action_space, config)
        checkpoint.load_agent(run_folder.checkpoints, agent)
        evaluated = evaluate(agent, env, 3).returns
    assert len(np.unique(filmed)) == 3
    np.testing.assert_allclose(filmed, evaluated, rtol=0, atol=1e-5)
    other = visualize(tmp_path / "run", seed=1)
    assert abs(other[0] - filmed[0]) > 1e-5
    # Rewards are actions, and the most likely actions of this policy are close to 0.
    assert np.abs(filmed).max() < 0.3
    options = ("--sampled", "--episodes", 2, "--import", *MODULES)
    code, _, error = ppo("visualize", tmp_path / "run", *options)
    assert code == 0, error
    summary = json.loads((tmp_path / "run" / "films" / "step-100.json").read_text())
    assert summary["actions"] == "sample"
    assert np.abs(summary["returns"]).max() > 0.3


def test_images_action_masks_and_multi_discrete_actions_are_supported(
    tmp_path: Path,
) -> None:
    returns = visualize(tmp_path / "run", CONFIG.replace(env_name=MASKED))
    assert returns.tolist() == [5.0]  # the mask allows only action 1


def test_an_episode_of_one_step_is_shown_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo.evaluation.videos.frames_per_second", lambda _: 125.0)
    visualize(tmp_path / "run", CONFIG.replace(env_kwargs={"length": 1}))
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"GIF89a" in events.read_bytes()


def test_the_summary_is_not_written_through_a_link(tmp_path: Path) -> None:
    save_run(tmp_path / "run", CONFIG)
    (tmp_path / "precious").write_text("x")
    (tmp_path / "run" / "films").mkdir()
    (tmp_path / "run" / "films" / "step-100.json").symlink_to(tmp_path / "precious")
    with pytest.raises(OutputError, match=r"step-100\.json: cannot be written"):
        visualize(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "x"


def test_a_lost_episode_is_recorded_again(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    save_run(tmp_path / "run", CONFIG.replace(env_kwargs={"marker": str(marker)}))
    marker.touch()
    visualize(tmp_path / "run", episodes=2)
    assert not marker.exists()
    for film in films(tmp_path / "run" / "films"):
        assert [step for _, step in film] == [0, 1, 2, 3, 4, 5]


def test_an_env_that_loses_every_episode_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(env: Any, act: Any, on_frame: Callable[[np.ndarray], None]) -> None:
        on_frame(np.zeros((16, 16, 3), np.uint8))

    monkeypatch.setattr("ppo.evaluation.videos.play_episode", lose)
    with pytest.raises(EnvsLostError, match="the last 20 were lost in a row"):
        visualize(tmp_path / "run")
    assert list((tmp_path / "run" / "films").iterdir()) == []


def test_an_endless_episode_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo.evaluation.videos._MAX_STEPS", 4)
    with pytest.raises(EnvDataError, match=r"within 4 steps; train .*TimeLimit"):
        visualize(tmp_path / "run")
    assert list((tmp_path / "run" / "films").iterdir()) == []


def test_envs_on_a_server_can_be_recorded(tmp_path: Path) -> None:
    save_run(tmp_path / "run", CONFIG)
    save_run(tmp_path / "other", CONFIG.replace(env_kwargs={"length": 3}))
    other = tmp_path / "other"
    with ServerProcess(tmp_path, "--import", *MODULES) as server:
        source = EnvSource(addresses=(server.address,))
        RunFolder(tmp_path / "run").save_env_source(source)
        options = "--episodes", 2, "--trust"
        code, output, error = ppo("visualize", tmp_path / "run", *options)
        connect = "--connect", server.address
        other_code, _, other_error = ppo("visualize", other, *connect)
    assert code == 0, error
    assert f"Env servers of the run: {server.address}\n" in output
    frames = [[(episode, step) for step in range(6)] for episode in range(2)]
    assert films(tmp_path / "run" / "films") == frames
    assert other_code == 2
    assert "env argument 'length' may not be" in other_error
    assert "expected an env that accepts" not in other_error


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", "accepts render_mode='rgb_array'; env_kwargs:"),
        ("raise", "RuntimeError: no canvas; the env must support render_mode"),
        ("pygame", re.escape(install_command("video")) + " on the host that runs"),
        ("mujoco", "set MUJOCO_GL=egl or MUJOCO_GL=osmesa there"),
        ("none", "got NoneType; the env must support render_mode='rgb_array'"),
        ("grows", "render all frames at the same size"),
    ],
)
def test_an_env_that_cannot_be_recorded_is_a_one_line_error(
    tmp_path: Path, fault: str, message: str
) -> None:
    folder = tmp_path / "run"
    config = CONFIG.replace(env_name=WITHOUT_RENDER_MODE)
    if fault:
        config = CONFIG.replace(env_kwargs={"fault": fault})
    with pytest.raises(VideoError, match=message) as caught:
        visualize(folder, config)
    assert "\n" not in str(caught.value)
    assert not list((folder / "films").glob("*"))


def test_the_error_of_an_env_without_arguments_names_the_render_mode(
    tmp_path: Path,
) -> None:
    text = r"accepts render_mode='rgb_array'; env_kwargs: .* arguments, got render_mode"
    with pytest.raises(VideoError, match=text):
        visualize(tmp_path / "run", CONFIG.replace(env_name=WITHOUT_ARGUMENTS))


def test_checkpoint_and_ffmpeg_are_checked_before_an_env_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.replace(env_name="not-registered")
    save_run(tmp_path / "run", CONFIG)
    run_folder, _ = RunFolder.open(tmp_path / "run")
    run_folder.save_config(config)
    known = re.escape("at 7 steps, found checkpoints at 100;")
    with pytest.raises(CheckpointError, match=known):
        visualize(tmp_path / "run", which=7)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(VideoError, match="ffmpeg is needed to write videos"):
        visualize(tmp_path / "run")


def test_packages_for_films_are_checked_before_tensorflow_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder.create(tmp_path / "run", Config(env_name="CartPole-v1"))
    commands = (
        ("train", "CartPole-v1", "--film"),
        ("train", "--resume", "run", "--film"),
        ("visualize", "run"),
    )
    monkeypatch.setitem(sys.modules, "pygame", None)
    for command in commands:
        code, output, error = ppo(*command)
        assert (code, output) == (2, "")
        assert "CartPole-v1 renders with pygame; " in error
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setenv("PATH", "")
    for command in commands:
        code, output, error = ppo(*command)
        assert (code, output) == (2, "")
        assert "ffmpeg is needed to write videos" in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_env_that_does_not_render_is_rejected_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    modules = "--import", *MODULES
    code, output, error = ppo("train", WITHOUT_RENDER_MODE, "--film", *modules)
    assert (code, output) == (2, "")
    assert "expected an env that accepts render_mode='rgb_array'" in error
    kwargs = "--set", 'env_kwargs={"fault": "none"}'
    code, output, error = ppo("train", NAME, "--film", *modules, *kwargs)
    assert (code, output) == (2, "")
    assert "expected render() to return a frame" in error
    assert list(tmp_path.iterdir()) == []
