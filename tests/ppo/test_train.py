"""The loop: files, resuming, stopping, reproducibility, errors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator

from envserve.client import BatchEnv
from envserve.errors import EnvError
from ppo.agent import Agent
from ppo.config import Config
from ppo.errors import (
    CheckpointError,
    DivergedError,
    EnvDataError,
    EnvsLostError,
    RunWriteError,
)
from ppo.evaluate import evaluate_run
from ppo.run_folder import checkpoint
from ppo.run_folder.folder import RunFolder
from ppo.train import Progress, TrainResult, train
from tests.ppo.fakes import CountingBatchEnv, as_batch_env

CONFIG = Config(
    env_name="fake",
    num_envs=2,
    horizon=8,
    total_steps=64,
    epochs=1,
    minibatch_size=8,
    policy_layers=(4,),
    value_layers=(4,),
    checkpoint_every=32,
    evaluation_episodes=3,
    jit_compile=False,  # compiling takes longer than these few updates
)


class Maker:
    """Makes fakes, and keeps what it was asked for."""

    def __init__(self, make: Callable[[int], CountingBatchEnv] | None = None) -> None:
        self.made: list[CountingBatchEnv] = []
        self.seeds: list[int] = []
        self._make = make or (lambda num_envs: CountingBatchEnv([3] * num_envs))

    def __call__(self, *, num_envs: int, seed: int) -> BatchEnv:
        self.made.append(self._make(num_envs))
        self.seeds.append(seed)
        return as_batch_env(self.made[-1])


def parameters(agent: Agent) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in agent.trainable_variables])


def run(
    folder: Path, config: Config = CONFIG, maker: Maker | None = None, **named: Any
) -> TrainResult:
    run_folder = RunFolder.create(folder, config)
    return train(config, run_folder, maker or Maker(), **named)


def test_a_run_leaves_metrics_and_checkpoints_and_closes_its_envs(
    tmp_path: Path,
) -> None:
    maker = Maker()
    shown: list[Progress] = []
    result = run(tmp_path / "run", maker=maker, on_progress=shown.append)
    assert result.is_finished
    assert result.steps == 64
    assert maker.made[0].is_closed
    assert [progress.steps for progress in shown] == [16, 32, 48, 64]
    assert shown[-1].total_steps == 64
    assert shown[-1].mean_return == 3.0
    assert shown[-1].steps_per_second > 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["steps"] for row in rows] == [16, 32, 48, 64]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert all(row["ratio_deviation"] < 1e-5 for row in rows)
    assert rows[-1]["mean_length"] == 3.0
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["00000001", "00000002", "00000004"]


def test_the_same_config_gives_the_same_bits_and_another_seed_does_not(
    tmp_path: Path,
) -> None:
    results = [
        parameters(run(tmp_path / str(index), CONFIG.replace(seed=seed)).agent)
        for index, seed in enumerate([5, 5, 6])
    ]
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any()


def test_a_stopped_run_is_saved_and_goes_on_where_it_was(tmp_path: Path) -> None:
    maker = Maker()
    stopped = run(tmp_path / "run", maker=maker, should_stop=lambda: True)
    assert not stopped.is_finished
    assert stopped.steps == 16
    run_folder, config = RunFolder.open(tmp_path / "run")
    assert checkpoint.read_counters(run_folder.checkpoints).iteration == 1
    resumed = train(config, run_folder, maker, resume=True)
    assert resumed.is_finished
    assert resumed.steps == 64
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3, 4]
    # The resumed run does not play its first episodes again.
    assert maker.seeds[0] != maker.seeds[1]


def test_resuming_at_an_episode_boundary_equals_not_having_stopped(
    tmp_path: Path,
) -> None:
    # Episodes of 8 steps end with each rollout, so nothing is cut off by stopping.
    maker = Maker(lambda num_envs: CountingBatchEnv([8] * num_envs))
    straight = run(tmp_path / "straight", maker=maker)
    run(tmp_path / "stopped", maker=maker, should_stop=lambda: True)
    run_folder, config = RunFolder.open(tmp_path / "stopped")
    resumed = train(config, run_folder, maker, resume=True)
    np.testing.assert_array_equal(parameters(straight.agent), parameters(resumed.agent))


def test_a_moved_run_goes_on_and_forgets_what_its_checkpoint_does_not_know(
    tmp_path: Path,
) -> None:
    maker = Maker(lambda num_envs: CountingBatchEnv([8] * num_envs))
    straight = run(tmp_path / "straight", maker=maker)
    config = CONFIG.replace(checkpoint_every=0, checkpoint_seconds=1e9)
    run(tmp_path / "made", config, maker)
    # As if it had been killed in its last iteration, with one checkpoint.
    shutil.rmtree(tmp_path / "made" / "checkpoints" / "00000004")
    events = tmp_path / "made" / "tensorboard"
    (old,) = events.iterdir()
    old.rename(events / "events.out.tfevents.1000000000.host.1.0.v2")
    shutil.move(tmp_path / "made", tmp_path / "moved")
    moved, config = RunFolder.open(tmp_path / "moved")
    resumed = train(config, moved, maker, resume=True)
    np.testing.assert_array_equal(parameters(straight.agent), parameters(resumed.agent))
    rows = map(json.loads, moved.metrics_path.read_text().splitlines())
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    # TensorBoard shows each step once, with what came last.
    accumulator = plugin_event_accumulator.EventAccumulator(
        str(moved.path / "tensorboard")
    )
    accumulator.Reload()
    shown = accumulator.Tensors("iteration")
    assert [event.step for event in shown] == [16, 32, 48, 64]
    assert len(list((moved.path / "tensorboard").iterdir())) == 3


def test_resuming_a_finished_run_does_nothing_more(tmp_path: Path) -> None:
    before = run(tmp_path / "run")
    run_folder, config = RunFolder.open(tmp_path / "run")
    again = train(config, run_folder, Maker(), resume=True)
    assert again.is_finished
    assert again.steps == before.steps
    np.testing.assert_array_equal(parameters(before.agent), parameters(again.agent))


def test_changed_settings_are_saved_once_they_are_known_to_fit(tmp_path: Path) -> None:
    run(tmp_path / "run")
    run_folder, config = RunFolder.open(tmp_path / "run")
    with pytest.raises(CheckpointError, match="networks that the config describes"):
        train(config.replace(policy_layers=(5,)), run_folder, Maker(), resume=True)
    assert RunFolder.open(tmp_path / "run")[1] == config
    longer = config.replace(total_steps=80)
    assert train(longer, run_folder, Maker(), resume=True).steps == 80
    assert RunFolder.open(tmp_path / "run")[1] == longer


def test_resuming_what_ended_within_its_first_iteration_begins_again(
    tmp_path: Path,
) -> None:
    run_folder = RunFolder.create(tmp_path / "run", CONFIG)
    run_folder.metrics_path.write_text('{"steps": 16, "iteration": 1}\n{"steps')
    maker = Maker()
    assert train(CONFIG, run_folder, maker, resume=True).steps == 64
    assert maker.seeds == [CONFIG.seed]
    rows = map(json.loads, run_folder.metrics_path.read_text().splitlines())
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]


def test_resuming_without_the_checkpoints_is_an_error(tmp_path: Path) -> None:
    run_folder = RunFolder.create(tmp_path / "run", CONFIG)
    run_folder.metrics_path.write_text('{"steps": 32, "iteration": 2}\n')
    maker = Maker()
    with pytest.raises(CheckpointError, match="expected a checkpoint, found none"):
        train(CONFIG, run_folder, maker, resume=True)
    assert maker.made == []


def test_lost_steps_are_neither_counted_nor_learned_from(tmp_path: Path) -> None:
    lost = frozenset((step, 0) for step in range(8)) | {(3, 1)}
    maker = Maker(lambda num_envs: CountingBatchEnv([3] * num_envs, lost=lost))
    result = run(tmp_path / "run", maker=maker)
    assert result.steps == 64 - 9
    assert result.lost_steps == 9
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["invalid_steps"] == 9


def test_an_iteration_without_any_valid_step_changes_nothing_and_is_an_error(
    tmp_path: Path,
) -> None:
    lost = frozenset((step, b) for step in range(16) for b in range(2))
    maker = Maker(lambda num_envs: CountingBatchEnv([3] * num_envs, lost=lost))
    with pytest.raises(EnvsLostError, match="100 % of the last iteration's 16 steps"):
        run(tmp_path / "run", maker=maker)
    spaces = maker.made[0].observation_space, maker.made[0].action_space
    fresh, saved = Agent(*spaces, CONFIG), Agent(*spaces, CONFIG.replace(seed=1))
    counters = checkpoint.load_agent(tmp_path / "run" / "checkpoints", saved)
    assert counters == (1, 0)
    np.testing.assert_array_equal(parameters(saved), parameters(fresh))


def test_hardly_any_valid_step_for_ten_iterations_ends_the_run(tmp_path: Path) -> None:
    lost = frozenset(
        (step, b) for step in range(400) for b in range(2) if (step % 8, b) != (0, 0)
    )
    maker = Maker(lambda num_envs: CountingBatchEnv([3] * num_envs, lost=lost))
    with pytest.raises(EnvsLostError, match="94 % of the last"):
        run(tmp_path / "run", CONFIG.replace(total_steps=800), maker)
    counters = checkpoint.read_counters(tmp_path / "run" / "checkpoints")
    assert counters == (10, 10)


def test_checkpoints_are_due_by_time_too(tmp_path: Path) -> None:
    config = CONFIG.replace(checkpoint_every=0, checkpoints_to_keep=9)
    for seconds, expected in ((0.0, [1, 2, 3, 4]), (1e6, [1, 4])):
        folder = tmp_path / str(seconds)
        run(folder, config.replace(checkpoint_seconds=seconds))
        saved = sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
        assert saved == expected


def test_an_interrupt_within_a_rollout_ends_it(tmp_path: Path) -> None:
    maker = Maker()

    def interrupt() -> None:
        if len(maker.made[0].actions) == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", maker=maker, on_step=interrupt)
    assert len(maker.made[0].actions) == 11
    assert maker.made[0].is_closed


def test_an_error_of_the_envs_arrives_as_itself_and_loses_nothing(
    tmp_path: Path,
) -> None:
    class Failing(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: Any = None) -> Any:
            if len(self.actions) == 10:
                raise EnvError("Env 1: boom", env_index=1)
            return super().step(actions, out)

    maker = Maker(lambda num_envs: Failing([8] * num_envs))
    with pytest.raises(EnvError, match="boom"):
        run(tmp_path / "run", maker=maker)
    assert maker.made[0].is_closed
    run_folder, config = RunFolder.open(tmp_path / "run")
    assert checkpoint.read_counters(run_folder.checkpoints).iteration == 1
    maker = Maker(lambda num_envs: CountingBatchEnv([8] * num_envs))
    resumed = train(config, run_folder, maker, resume=True)
    straight = run(tmp_path / "straight", maker=maker)
    np.testing.assert_array_equal(parameters(straight.agent), parameters(resumed.agent))


def test_numbers_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    maker = Maker(
        lambda num_envs: CountingBatchEnv(
            [3] * num_envs, observe=lambda rows: np.where(rows == 2.0, np.nan, rows)
        )
    )
    with pytest.raises(EnvDataError, match="Env 0"):
        run(tmp_path / "run", maker=maker)


def test_an_update_that_diverges_ends_the_run_and_is_not_saved(tmp_path: Path) -> None:
    class Exploding(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: Any = None) -> Any:
            result = super().step(actions, out)
            if len(self.actions) > 24:  # in the last iteration
                out.reward[:] = 1e30  # its square does not fit into float32
            return result

    maker = Maker(lambda num_envs: Exploding([3] * num_envs))
    config = CONFIG.replace(scale_rewards=False, checkpoint_seconds=0.0)
    with pytest.raises(DivergedError, match="gradients whose norm is finite, got"):
        run(tmp_path / "run", config, maker)
    checkpoints = RunFolder(tmp_path / "run").checkpoints
    assert checkpoint.read_counters(checkpoints).iteration == 3
    agent = Agent(maker.made[0].observation_space, maker.made[0].action_space, config)
    checkpoint.load_agent(checkpoints, agent)
    assert np.isfinite(parameters(agent)).all()


def test_a_full_disk_ends_the_run_with_what_to_do(tmp_path: Path) -> None:
    run_folder = RunFolder.create(tmp_path / "run", CONFIG)
    (run_folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunWriteError, match=r"No space left .* free some space"):
        train(CONFIG, run_folder, Maker())


def test_the_newest_checkpoint_is_evaluated_on_envs_of_its_own(tmp_path: Path) -> None:
    maker = Maker()
    run(tmp_path / "run", maker=maker)
    run_folder, config = RunFolder.open(tmp_path / "run")
    evaluation = evaluate_run(config, run_folder, maker)
    assert evaluation.returns.tolist() == [3.0, 3.0, 3.0]
    assert maker.made[1].is_closed
    assert maker.seeds[0] != maker.seeds[1]
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert saved["steps"] == 64
    assert saved["episodes"] == 3
    assert saved["mean_return"] == 3.0
    evaluate_run(config, run_folder, maker, which=32)
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert saved["steps"] == 32
