"""Checkpoints: bit-identical resuming, atomic writes, retention, and errors."""

import errno
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.algorithms.algorithm import Algorithm
from ppo.algorithms.ppo.ppo import PPO
from ppo.algorithms.sac.sac import SAC
from ppo.config import Config
from ppo.errors import CheckpointError, RunWriteError
from ppo.rollout import Rollout
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import CheckpointId, Counters, training_state
from ppo.run_folder.folder import RunFolder
from tests.ppo.fakes import ACTIONS, BOX
from tests.ppo.runs import SMALL, eagerly, rollout_of

CONFIG = SMALL.replace(
    total_steps=160, epochs=2, minibatch_size=4, policy_layers=(8,), value_layers=(8,)
)


class Learner:
    def __init__(self, config: Config = CONFIG) -> None:
        self.agent = Agent(BOX, ACTIONS, config)
        algorithm = PPO(self.agent, config)
        self.updater, self.return_scale = algorithm.updater, algorithm.return_scale
        self.state = training_state(self.agent, algorithm.trackables)

    def save(self, folder: Path, iteration: int, **named: Any) -> Path:
        counters = Counters(iteration, 100 * iteration)
        return checkpoint.save(folder, counters, self.state, **{"keep": 3, **named})

    def restore(self, folder: Path) -> Counters:
        checkpoint.restore(folder, self.state)
        return checkpoint.read_counters(folder)

    def learn(self, rollout: Rollout, seed: int) -> None:
        self.return_scale.update(rollout.reward, rollout.done, rollout.valid)
        self.updater.update(
            rollout, reward_scale=self.return_scale.factor, seed=(seed, 0)
        )
        self.agent.preprocess.update(
            rollout.observation[:-1].reshape(-1, 2), tf.reshape(rollout.valid, [-1])
        )

    def numbers(self) -> np.ndarray:
        variables = [*self.agent.trainable_variables, *self.updater.optimizer.variables]
        parts = [np.ravel(variable.numpy()) for variable in variables]
        probe = self.agent.preprocess(tf.constant([[1.0, 2.0]], tf.float64))
        return np.concatenate([*parts, probe.numpy()[0], [self.return_scale.factor]])


def saved_batch(path: Path) -> Rollout:
    """Return the rollout saved at a path; create a random one if there is none."""
    if not path.exists():
        generator = np.random.default_rng(5)
        done = generator.random((8, 2)) < 0.2
        # A resumed run starts new episodes, so end all episodes of this batch.
        done[-1] = True
        np.savez(
            path,
            observation=generator.normal(size=(9, 2, 2)),
            action=generator.normal(size=(8, 2, 1)).astype(np.float32),
            log_prob=generator.normal(-1, 0.1, (8, 2)).astype(np.float32),
            reward=generator.normal(size=(8, 2)),
            terminated=done,
            final_observation=generator.normal(size=(8, 2, 2)),
        )
    with np.load(path) as arrays:
        return rollout_of(8, 2, **arrays)


def continue_from(folder: Path) -> None:
    """Restore, update on the saved batch and save the numbers, in a new process."""
    learner = Learner()
    tf.config.run_functions_eagerly(True)
    assert learner.restore(folder / "checkpoints") == Counters(7, 700)
    learner.learn(saved_batch(folder / "batch.npz"), seed=2)
    np.save(folder / "continued.npy", learner.numbers())


@eagerly()
def test_a_new_process_continues_with_bit_equal_updates(tmp_path: Path) -> None:
    batch = saved_batch(tmp_path / "batch.npz")
    learner = Learner()
    learner.learn(batch, seed=1)
    learner.save(tmp_path / "checkpoints", 7)
    learner.learn(batch, seed=2)
    code = f"import tests.ppo.preload; from {__name__} import *; continue_from(Path())"
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, check=True)
    continued = np.load(tmp_path / "continued.npy")
    assert len(np.unique(continued)) > 50
    np.testing.assert_array_equal(continued, learner.numbers())


@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_variables_are_all_that_a_checkpoint_stores(
    tmp_path: Path, algorithm: type[Algorithm]
) -> None:
    """Learners that join a resumed run receive these variables from the chief."""
    config = Config(env_name="fake", algorithm=algorithm.__name__.lower())
    agent = algorithm.make_agent(BOX, ACTIONS, config)
    state = training_state(agent, algorithm(agent, config).trackables)
    stored = [
        name
        for name, _ in tf.train.list_variables(state.write(str(tmp_path / "state")))
        if name.endswith("VARIABLE_VALUE")
    ]
    assert len(checkpoint.variables(state)) == len(stored) > 20


def test_only_the_newest_checkpoints_are_kept_and_the_newest_is_read(
    tmp_path: Path,
) -> None:
    learner = Learner()
    for iteration in (1, 2, 10, 11):
        learner.save(tmp_path, iteration, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000010", "00000011"]
    assert checkpoint.read_counters(tmp_path) == Counters(11, 1100)


def test_a_saved_checkpoint_and_its_name_are_flushed_to_disk(
    tmp_path: Path, flushed_inodes: list[int]
) -> None:
    path = Learner().save(tmp_path, 1)
    *files, folder, parent = flushed_inodes
    assert sorted(files) == sorted(file.stat().st_ino for file in path.iterdir())
    assert [folder, parent] == [path.stat().st_ino, tmp_path.stat().st_ino]


def test_an_unfinished_checkpoint_is_ignored_and_replaced(tmp_path: Path) -> None:
    learner = Learner()
    learner.save(tmp_path, 1)
    (tmp_path / "00000002.partial").mkdir()
    (tmp_path / "00000002.partial" / "state.index").write_text("half")
    (tmp_path / "00000000.old.partial").mkdir()
    assert learner.restore(tmp_path) == Counters(1, 100)
    learner.save(tmp_path, 2)
    assert learner.restore(tmp_path) == Counters(2, 200)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00000001", "00000002"]


def test_saving_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    learner, restored = Learner(), Learner()
    learner.save(tmp_path, 1)
    variable = learner.agent.trainable_variables[0]
    variable.assign(variable + 1.0)
    learner.save(tmp_path, 1)
    restored.restore(tmp_path)
    np.testing.assert_array_equal(restored.numbers(), learner.numbers())


@eagerly()
def test_adaptive_coefficients_are_restored(tmp_path: Path) -> None:
    config = CONFIG.replace(
        objective="penalty", learning_rate_schedule="kl_adaptive", kl_target=1e-9
    )
    batch = saved_batch(tmp_path / "batch.npz")
    learner = Learner(config)
    learner.learn(batch, seed=1)
    learner.save(tmp_path / "checkpoints", 1)
    restored = Learner(config)
    restored.restore(tmp_path / "checkpoints")
    metrics = restored.updater.update(batch, seed=(2, 0))
    assert metrics["kl_penalty"] == pytest.approx(1.5)
    assert metrics["learning_rate"] == pytest.approx(config.learning_rate / 1.5)


def test_load_agent_loads_only_the_agent(tmp_path: Path) -> None:
    learner = Learner()
    learner.agent.preprocess.update(np.ones((2, 2)), tf.constant([True, True]))
    folder = tmp_path / "rate=[1]?*\\"  # TensorFlow reads such a name as a pattern
    folder.mkdir()
    learner.save(folder, 3)
    agent = Agent(BOX, ACTIONS, CONFIG.replace(seed=9))
    assert checkpoint.load_agent(folder, agent) == Counters(3, 300)
    observation = tf.constant([[0.5, -1.0]], tf.float64)
    seed = tf.constant([0, 0])
    actions = [each.mode(observation, seed)[0] for each in (agent, learner.agent)]
    assert actions[0] == actions[1]


def test_a_checkpoint_is_found_by_its_steps(tmp_path: Path) -> None:
    learner = Learner()
    paths = [learner.save(tmp_path, iteration) for iteration in (1, 2, 10)]
    assert checkpoint.checkpoint_at(tmp_path, 200) == paths[1]
    assert checkpoint.checkpoint_at(tmp_path, None) == paths[2]
    assert checkpoint.load_agent(tmp_path, learner.agent, 100) == Counters(1, 100)
    with pytest.raises(
        CheckpointError, match="at 300 steps, found checkpoints at 100, 200,"
    ):
        checkpoint.checkpoint_at(tmp_path, 300)


def test_the_best_checkpoint_is_kept_and_found(tmp_path: Path) -> None:
    learner = Learner()
    learner.save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="expected a checkpoint with an evaluat"):
        checkpoint.checkpoint_at(tmp_path, "best")
    assert checkpoint.best_return(tmp_path) == -np.inf
    returns = {2: -5.0, 3: 7.0, 4: 7.0, 5: None, 6: 6.5, 7: None}
    for iteration, value in returns.items():
        learner.save(tmp_path, iteration, keep=2, evaluation_return=value)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00000003", "00000006", "00000007"]
    assert checkpoint.best_return(tmp_path) == 7.0
    assert checkpoint.load_agent(tmp_path, learner.agent, "best") == Counters(3, 300)
    assert checkpoint.read_counters(tmp_path) == Counters(7, 700)


@pytest.mark.parametrize("which", [None, 300, "best"])
def test_a_folder_without_checkpoints_is_an_error_that_names_it(
    which: CheckpointId, tmp_path: Path
) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        message = f"{folder}: expected a checkpoint, found none"
        with pytest.raises(CheckpointError, match=message):
            checkpoint.read_counters(folder, which)


def test_an_unreadable_folder_of_checkpoints_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", deny)
    message = f"{tmp_path}: cannot be read, Permission denied; make it readable"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_counters(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"policy_layers": (9,)}, {"value_layers": ()}, {"normalize_observations": False}],
)
def test_a_checkpoint_of_other_networks_is_an_error(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    Learner().save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="networks that the config describes"):
        Learner(CONFIG.replace(**changes)).restore(tmp_path)


def test_a_checkpoint_that_cannot_be_read_does_not_suggest_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "[a]").mkdir()
    learner = Learner()
    path = learner.save(tmp_path / "[a]", 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(CheckpointError) as caught:
        learner.restore(tmp_path / "[a]")
    message = f"{path}: cannot be read; [Errno 2] No such file or directory: "
    assert str(caught.value).startswith(message)


def test_a_full_disk_leaves_the_previous_checkpoint_intact(tmp_path: Path) -> None:
    learner = Learner()
    learner.save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with (
            pytest.raises(RunWriteError, match="00000002"),
            RunFolder(tmp_path).writing(),
        ):
            learner.save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.read_counters(tmp_path) == Counters(1, 100)


def test_recurrent_networks_are_restored(tmp_path: Path) -> None:
    config = CONFIG.replace(recurrent_size=3, minibatch_size=8)
    saved, restored = Learner(config), Learner(config.replace(seed=1))
    assert len(saved.numbers()) > len(Learner().numbers())
    saved.save(tmp_path, iteration=1)
    restored.restore(tmp_path)
    np.testing.assert_array_equal(saved.numbers(), restored.numbers())
