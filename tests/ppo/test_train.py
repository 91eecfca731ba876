"""The training loop: files, resuming, stopping, reproducibility, errors."""

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import plugin_event_accumulator

from envserve.client import BatchEnv, Status
from envserve.errors import EnvError
from ppo.agent.agent import Agent
from ppo.environments import env_maker
from ppo.errors import (
    CheckpointError,
    DivergedError,
    EnvDataError,
    EnvsLostError,
    LearnerLostError,
    RunFolderError,
    RunLockedError,
    RunWriteError,
    TrainingStopped,
)
from ppo.evaluation.evaluate import evaluate_run
from ppo.learners import Learners
from ppo.run_folder import checkpoint
from ppo.run_folder.folder import RunFolder
from ppo.train import Progress, train
from tests.ppo import film_env
from tests.ppo.fakes import CountingBatchEnv
from tests.ppo.runs import (
    SMALL,
    Maker,
    counters,
    eagerly,
    eights,
    parameters,
    rows_of,
    run,
)

pytestmark = pytest.mark.usefixtures("one_launcher")

#: With several minibatches, the order of the rows affects the parameters.
SHUFFLED = SMALL.replace(minibatch_size=8)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Return the parameters after an uninterrupted run in envs of `eights`."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return parameters(run(folder, SHUFFLED, Maker(eights)).agent)


def losing(lost: frozenset[tuple[int, int]]) -> Maker:
    return Maker(lambda num_envs: CountingBatchEnv([3] * num_envs, lost=lost))


def test_run_writes_metrics_and_checkpoints_and_closes_its_envs(tmp_path: Path) -> None:
    maker = Maker()
    shown: list[Progress] = []
    result = run(
        tmp_path / "run", maker=maker, on_progress=shown.append, in_graphs=True
    )
    assert result.is_finished
    assert result.steps == 64
    assert maker.made[0].is_closed
    assert [progress.steps for progress in shown] == [16, 32, 48, 64]
    assert shown[-1].mean_return == 3.0
    assert shown[-1].steps_per_second > 0
    rows = rows_of(tmp_path / "run")
    assert [row["steps"] for row in rows] == [16, 32, 48, 64]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4]
    assert all(row["ratio_deviation"] < 1e-5 for row in rows)
    assert rows[-1]["mean_length"] == 3.0
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["00000001", "00000002", "00000004"]


def test_run_collects_other_steps_for_lost_ones(tmp_path: Path) -> None:
    lost = frozenset((batch_step, 1) for batch_step in range(16))
    result = run(tmp_path / "run", maker=losing(lost))
    assert result.is_finished
    rows = rows_of(tmp_path / "run")
    assert [row["steps"] for row in rows] == [8, 16, 32, 48, 64]
    # The learning rate depends on the valid steps, so it reaches 0 at the end.
    rates = SMALL.learning_rate * (1 - np.array([0, 8, 16, 32, 48]) / 64)
    np.testing.assert_allclose([row["learning_rate"] for row in rows], rates, rtol=1e-5)


def test_same_seed_gives_equal_parameters_and_another_seed_does_not(
    tmp_path: Path,
) -> None:
    short = SHUFFLED.replace(total_steps=32)
    results = [
        parameters(run(tmp_path / str(index), short.replace(seed=seed)).agent)
        for index, seed in enumerate([5, 5, 6])
    ]
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any()


def test_stopped_run_is_saved_and_can_be_resumed(
    tmp_path: Path, straight: np.ndarray
) -> None:
    maker = Maker(eights)
    stopped = run(tmp_path / "run", SHUFFLED, maker, should_stop=lambda: True)
    assert not stopped.is_finished
    assert stopped.steps == 16
    assert counters(tmp_path / "run").iteration == 1
    resumed = run(tmp_path / "run", SHUFFLED, maker, resume=True)
    assert resumed.is_finished
    assert resumed.steps == 64
    assert [row["iteration"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4]
    # The resumed run has different seeds, so it does not repeat its first episodes.
    assert maker.seeds[0] != maker.seeds[1]
    # Stopping at the end of an episode changes nothing else.
    np.testing.assert_array_equal(straight, parameters(resumed.agent))


def test_moved_run_resumes_and_removes_metrics_after_its_checkpoint(
    tmp_path: Path, straight: np.ndarray
) -> None:
    maker = Maker(eights)
    without = SHUFFLED.replace(checkpoint_every=0, checkpoint_seconds=1e9)
    run(tmp_path / "made", without, maker)
    # The state of a run that was killed in its last iteration, with one checkpoint.
    shutil.rmtree(tmp_path / "made" / "checkpoints" / "00000004")
    events = tmp_path / "made" / "tensorboard"
    (old,) = events.iterdir()
    old.rename(events / "events.out.tfevents.1000000000.host.1.0.v2")
    shutil.move(tmp_path / "made", tmp_path / "moved")
    moved, config = RunFolder.open(tmp_path / "moved")
    assert config == without
    resumed = run(moved.path, config, maker, resume=True)
    np.testing.assert_array_equal(straight, parameters(resumed.agent))
    assert [row["iteration"] for row in rows_of(moved.path)] == [1, 2, 3, 4]
    # TensorBoard shows each step once, with the last value.
    accumulator = plugin_event_accumulator.EventAccumulator(
        str(moved.path / "tensorboard")
    )
    accumulator.Reload()
    shown = accumulator.Tensors("time/iteration")
    assert [event.step for event in shown] == [16, 32, 48, 64]
    assert len(list((moved.path / "tensorboard").iterdir())) == 3


def test_finished_run_continues_only_with_more_steps_and_equal_networks(
    tmp_path: Path,
) -> None:
    before = run(tmp_path / "run")
    again = run(tmp_path / "run", resume=True)
    assert again.is_finished
    assert again.steps == before.steps
    np.testing.assert_array_equal(parameters(before.agent), parameters(again.agent))
    with pytest.raises(CheckpointError, match="networks that the config describes"):
        run(tmp_path / "run", SMALL.replace(policy_layers=(5,)), resume=True)
    assert RunFolder.open(tmp_path / "run")[1] == SMALL
    longer = SMALL.replace(total_steps=80)
    assert run(tmp_path / "run", longer, resume=True).steps == 80
    assert RunFolder.open(tmp_path / "run")[1] == longer


def test_a_run_with_checkpoints_is_not_started_again(tmp_path: Path) -> None:
    run(tmp_path / "run")
    run_folder, maker = RunFolder(tmp_path / "run"), Maker()
    with pytest.raises(RunFolderError, match="pass resume=True"):
        train(SMALL, run_folder, maker)
    assert maker.made == []


@eagerly()
def test_the_folder_contains_the_config_of_the_run(tmp_path: Path) -> None:
    run_folder = RunFolder.create(tmp_path / "run", SMALL.replace(total_steps=640))
    train(SMALL, run_folder, Maker())
    assert RunFolder.open(tmp_path / "run")[1] == SMALL


def test_run_without_a_complete_iteration_starts_again_when_resumed(
    tmp_path: Path,
) -> None:
    run_folder = RunFolder.create(tmp_path / "run", SMALL)
    run_folder.metrics_path.write_text('{"steps": 16, "iteration": 1}\n{"steps')
    maker = Maker()
    assert run(run_folder.path, maker=maker, resume=True).steps == 64
    assert maker.seeds == [SMALL.seed]
    assert [row["iteration"] for row in rows_of(run_folder.path)] == [1, 2, 3, 4]


def test_resuming_without_the_checkpoints_is_an_error(tmp_path: Path) -> None:
    run_folder = RunFolder.create(tmp_path / "run", SMALL)
    run_folder.metrics_path.write_text('{"steps": 32, "iteration": 2}\n')
    maker = Maker()
    with pytest.raises(CheckpointError, match="expected a checkpoint, found none"):
        run(run_folder.path, maker=maker, resume=True)
    assert maker.made == []


def test_a_run_is_locked_before_its_counters_are_read(tmp_path: Path) -> None:
    run_folder, maker = RunFolder.create(tmp_path / "run", SMALL), Maker()
    with run_folder.locked(), pytest.raises(RunLockedError):
        run(run_folder.path, maker=maker, resume=True)
    assert maker.made == []


def test_loss_of_a_learner_before_the_first_iteration_is_an_error(
    tmp_path: Path,
) -> None:
    learners = Learners(["a:1", "b:1"], 1)
    message = "Collective ops is aborted by: /job:worker/replica:0/task:0 has exited"
    error = tf.errors.UnavailableError(None, None, message)
    with (
        mock.patch.object(learners, "gather", side_effect=error),
        pytest.raises(LearnerLostError, match="Learner 1: learner 0 exited"),
    ):
        run(tmp_path / "run", learners=learners)


def test_lost_steps_are_not_counted(tmp_path: Path) -> None:
    lost = frozenset((step, 0) for step in range(8)) | {(3, 1)}
    result = run(tmp_path / "run", maker=losing(lost))
    assert result.steps == 64 - 9
    assert result.lost_steps == 9
    assert rows_of(tmp_path / "run")[0]["invalid_steps"] == 9


def test_an_episode_whose_end_arrives_late_is_not_lost(tmp_path: Path) -> None:
    class Late(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: Any = None) -> Any:
            result = super().step(actions, out)
            if len(self.actions) == 3:  # the end of the first episodes
                out.valid[0], out.status[0] = False, Status.LATE
            return result

    config = SMALL.replace(total_steps=16)
    run(tmp_path / "run", config, Maker(lambda num_envs: Late([3] * num_envs)))
    row = rows_of(tmp_path / "run")[0]
    assert (row["invalid_steps"], row["lost_episodes"]) == (1, 0)


def test_iteration_without_valid_steps_is_an_error_and_changes_nothing(
    tmp_path: Path,
) -> None:
    lost = frozenset((step, b) for step in range(16) for b in range(2))
    maker = losing(lost)
    with pytest.raises(EnvsLostError, match="100 % of the 16 steps in the last"):
        run(tmp_path / "run", maker=maker)
    spaces = maker.made[0].observation_space, maker.made[0].action_space
    fresh, saved = Agent(*spaces, SMALL), Agent(*spaces, SMALL.replace(seed=1))
    assert checkpoint.load_agent(tmp_path / "run" / "checkpoints", saved) == (1, 0)
    np.testing.assert_array_equal(parameters(saved), parameters(fresh))


def test_a_lost_step_does_not_end_a_run_whose_iterations_are_single_steps(
    tmp_path: Path,
) -> None:
    config = SMALL.replace(num_envs=1, horizon=1, minibatch_size=1, total_steps=4)
    result = run(tmp_path / "run", config, losing(frozenset({(0, 0), (3, 0)})))
    assert (result.steps, result.lost_steps, result.is_finished) == (4, 2, True)
    maker = losing(frozenset((step, 0) for step in range(2, 99)))
    with pytest.raises(EnvsLostError, match="100 % of the 1 steps"):
        run(tmp_path / "lost", config, maker)
    assert counters(tmp_path / "lost") == (10, 2)


def test_ten_iterations_with_few_valid_steps_end_the_run(tmp_path: Path) -> None:
    lost = frozenset(
        (step, b) for step in range(400) for b in range(2) if (step % 8, b) != (0, 0)
    )
    with pytest.raises(EnvsLostError, match="94 % of the 16"):
        run(tmp_path / "run", SMALL.replace(total_steps=800), losing(lost))
    assert counters(tmp_path / "run") == (10, 10)


def test_every_episode_may_be_lost_only_if_numbers_that_are_not_finite_are_masked(
    tmp_path: Path,
) -> None:
    lost = frozenset((step, b) for step in range(2, 300, 3) for b in range(2))
    config = SMALL.replace(total_steps=256)
    with pytest.raises(EnvsLostError, match="every env has lost its last 50 episodes"):
        run(tmp_path / "raise", config, losing(lost))
    config = config.replace(nonfinite="mask")
    assert run(tmp_path / "mask", config, losing(lost)).is_finished


def test_checkpoints_are_written_by_time_too(tmp_path: Path) -> None:
    config = SMALL.replace(total_steps=48, checkpoint_every=0, checkpoints_to_keep=9)
    for seconds, expected in ((0.0, [1, 2, 3]), (1e6, [1, 3])):
        folder = tmp_path / str(seconds)
        run(folder, config.replace(checkpoint_seconds=seconds))
        saved = sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
        assert saved == expected


def test_interrupt_within_a_rollout_ends_the_run(tmp_path: Path) -> None:
    maker = Maker()

    def interrupt() -> None:
        if len(maker.made[0].actions) == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", maker=maker, on_step=interrupt)
    assert len(maker.made[0].actions) == 11
    assert maker.made[0].is_closed


@pytest.mark.parametrize(("step", "num_saved"), [(3, 0), (27, 3)])
def test_a_stopped_rollout_leaves_a_checkpoint_of_the_iteration_before(
    step: int, num_saved: int, tmp_path: Path
) -> None:
    maker = Maker()

    def stop() -> None:
        if len(maker.made[0].actions) == step:
            raise TrainingStopped

    config = SMALL.replace(checkpoint_every=0)
    result = run(tmp_path / "run", config, maker, on_step=stop)
    assert (result.steps, result.is_finished) == (16 * num_saved, False)
    assert (tmp_path / "run" / "checkpoints").exists() == (num_saved > 0)
    if num_saved:
        assert counters(tmp_path / "run") == (num_saved, 16 * num_saved)


def test_a_run_without_rows_of_metrics_can_be_stopped(tmp_path: Path) -> None:
    """The run was killed after its first checkpoint, but before its first report."""
    config, steps = SMALL.replace(report_every=64), itertools.count()

    def interrupt() -> None:
        if next(steps) == 20:
            raise KeyboardInterrupt

    def stop() -> None:
        raise TrainingStopped

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", config, on_step=interrupt)
    assert rows_of(tmp_path / "run") == []
    result = run(tmp_path / "run", config, resume=True, on_step=stop)
    assert (result.steps, result.is_finished, result.curve) == (32, False, ())


def test_error_of_the_envs_is_raised_unchanged_after_a_checkpoint(
    tmp_path: Path, straight: np.ndarray
) -> None:
    class Failing(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: Any = None) -> Any:
            if len(self.actions) == 10:
                raise EnvError("Env 1: boom", env_index=1)
            return super().step(actions, out)

    maker = Maker(lambda num_envs: Failing([8] * num_envs))
    with pytest.raises(EnvError, match="boom"):
        run(tmp_path / "run", SHUFFLED, maker)
    assert maker.made[0].is_closed
    assert counters(tmp_path / "run").iteration == 1
    resumed = run(tmp_path / "run", SHUFFLED, Maker(eights), resume=True)
    np.testing.assert_array_equal(straight, parameters(resumed.agent))


def test_observations_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    def observe(rows: np.ndarray) -> np.ndarray:
        return np.where(rows == 2.0, np.nan, rows)

    maker = Maker(lambda num_envs: CountingBatchEnv([3] * num_envs, observe=observe))
    with pytest.raises(EnvDataError, match="Env 0"):
        run(tmp_path / "run", maker=maker)


def test_diverged_update_ends_the_run_without_a_checkpoint(tmp_path: Path) -> None:
    class Exploding(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: Any = None) -> Any:
            result = super().step(actions, out)
            if len(self.actions) > 24:  # in the last iteration
                out.reward[:] = 1e30  # its square overflows float32
            return result

    maker = Maker(lambda num_envs: Exploding([3] * num_envs))
    config = SMALL.replace(scale_rewards=False, checkpoint_seconds=0.0)
    with pytest.raises(DivergedError, match="expected a finite gradient norm, got"):
        run(tmp_path / "run", config, maker)
    assert counters(tmp_path / "run").iteration == 3
    agent = Agent(maker.made[0].observation_space, maker.made[0].action_space, config)
    checkpoint.load_agent(tmp_path / "run" / "checkpoints", agent)
    assert np.isfinite(parameters(agent)).all()


@eagerly()
@pytest.mark.parametrize("is_events", [False, True])
def test_full_disk_ends_the_run_with_an_error_that_names_the_remedy(
    is_events: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "{{node}} its words")

    run_folder = RunFolder.create(tmp_path / "run", SMALL)
    if is_events:
        monkeypatch.setattr("tensorflow.summary.experimental.write_raw_pb", refuse)
    else:
        run_folder.metrics_path.touch()
        monkeypatch.setattr(
            "ppo.run_folder.metrics.open_no_link",
            lambda path, flags: os.open("/dev/full", flags),
        )
    message = r"cannot be written, No space left on device; free some space\.$"
    with pytest.raises(RunWriteError, match=message):
        train(SMALL, run_folder, Maker())


@eagerly()
def test_unwritable_tensorboard_folder_is_an_error(tmp_path: Path) -> None:
    run_folder = RunFolder.create(tmp_path / "run", SMALL)
    (run_folder.path / "tensorboard").write_text("")
    with pytest.raises(RunWriteError, match="make it writable"):
        train(SMALL, run_folder, Maker())


@eagerly()
@pytest.mark.parametrize("report_every", [0, 64])  # metrics or checkpoint come first
@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_run_ends_at_the_next_write_if_its_folder_is_removed_or_renamed(
    is_renamed: bool, report_every: int, tmp_path: Path
) -> None:
    steps = itertools.count(1)

    def on_step() -> None:
        if next(steps) != 2 * SMALL.horizon:
            return
        if is_renamed:
            (tmp_path / "run").rename(tmp_path / "new")
        else:
            shutil.rmtree(tmp_path / "run")

    config = SMALL.replace(report_every=report_every)
    run_folder = RunFolder.create(tmp_path / "run", config)
    with pytest.raises(RunWriteError, match="was removed or renamed; resume the run"):
        train(config, run_folder, Maker(), on_step=on_step)
    assert next(steps) == 2 * SMALL.horizon + 1
    assert not (tmp_path / "run").exists()


def test_best_checkpoint_is_unchanged_if_envs_fail_after_a_resume(
    tmp_path: Path,
) -> None:
    class Failing(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: Any = None) -> Any:
            raise EnvError("Env 1: boom", env_index=1)

    config = SMALL.replace(evaluate_every=SMALL.total_steps)
    run(tmp_path / "run", config)
    longer = config.replace(total_steps=2 * config.total_steps)
    with pytest.raises(EnvError, match="boom"):
        run(tmp_path / "run", longer, Maker(lambda n: Failing([8] * n)), resume=True)
    best = checkpoint.checkpoint_at(tmp_path / "run" / "checkpoints", "best")
    assert best.name == "00000004"


def test_newest_checkpoint_is_evaluated_on_separate_envs(tmp_path: Path) -> None:
    maker = Maker()
    run(tmp_path / "run", maker=maker)
    run_folder, config = RunFolder.open(tmp_path / "run")
    final = {"steps": 64, "total_steps": 99}

    def make_env(**arguments: Any) -> BatchEnv:  # the run ends at the same time
        (run_folder.path / "evaluation.json").write_text(json.dumps(final))
        return maker(**arguments)

    evaluation = evaluate_run(config, run_folder, make_env)
    assert evaluation.returns.tolist() == [3.0, 3.0, 3.0]
    assert maker.made[1].is_closed
    assert maker.seeds[0] != maker.seeds[1]
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (saved["steps"], saved["final"]) == (64, final)
    assert saved["episodes"] == 3
    assert saved["mean_return"] == 3.0
    evaluate_run(config, run_folder, maker, which=32)
    saved = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (saved["steps"], saved["final"]) == (32, final)
    # The evaluation cannot be written if a folder has the name of its partial file.
    (tmp_path / "run" / "evaluation.json.partial").mkdir()
    with pytest.raises(RunWriteError) as caught:
        evaluate_run(config, run_folder, maker)
    shown = "Evaluation after 64 steps: mean return 3.0 over 3 episodes "
    assert caught.value.__notes__ == [shown + "(lowest 3.0, highest 3.0)"]


@eagerly()
def test_only_the_rows_of_a_dead_worker_are_lost(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    config = SMALL.replace(
        env_name=film_env.MASKED,
        env_kwargs={"length": 15, "marker": str(marker)},
        num_envs=4,
        horizon=32,
        total_steps=512,
        epochs=2,
        minibatch_size=32,
        network="mlp",
        nonfinite="mask",
    )
    make_env = env_maker(config, num_workers=2, import_modules=[film_env.__name__])
    run_folder = RunFolder.create(tmp_path / "run", config)
    result = train(config, run_folder, make_env)
    assert result.is_finished
    assert not marker.exists()
    rows = rows_of(run_folder.path)
    lost = sum(row["invalid_steps"] for row in rows)
    assert lost >= 1
    assert sum(row["lost_episodes"] for row in rows) >= 1
    assert [row["nonfinite_episodes"] for row in rows] == [0] * len(rows)
    assert result.steps == 512 - lost
    assert all(row["ratio_deviation"] < 1e-5 for row in rows)
    # Only complete episodes are reported, and those have 15 steps.
    assert rows[-1]["mean_length"] == 15.0
    evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    assert evaluation.lengths.tolist() == [15, 15, 15]
