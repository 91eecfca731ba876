"""Rollouts that are collected during an update: data, failures, resuming."""

import itertools
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from envserve.errors import EnvError
from ppo.agent.agent import Agent
from ppo.algorithms.ppo.update import Updater
from ppo.cli.stop_signals import StopSignals
from ppo.errors import DivergedError
from ppo.run_folder.folder import RunFolder
from ppo.simulate import Simulation
from tests.ppo.fakes import CountingBatchEnv, in_graph
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

OVERLAP = SMALL.replace(overlap=True)


def test_snapshot_is_not_changed_by_an_update() -> None:
    env = in_graph(eights(2))
    agent = Agent(env.env.observation_space, env.env.action_space, SMALL)
    simulation = Simulation(
        env,
        agent.act_from,
        SMALL.horizon,
        snapshot=agent.snapshot,
        log_prob=agent.log_prob,
        noise=agent.actions.noise,
        num_rollouts=2,
    )
    snapshot = agent.snapshot()
    first = simulation.run((0, 1), snapshot)
    action = first.action.copy()
    with eagerly():
        Updater(agent, SMALL).update(first, seed=(3, 4))
    agent.preprocess.update(first.observation[:-1].reshape(-1, 2), tf.ones([16], bool))
    # Both use the same env, noise and snapshot, but different arrays.
    again = simulation.run((0, 1), snapshot, reset=True)
    np.testing.assert_array_equal(again.action, action)
    np.testing.assert_array_equal(first.action, action)
    assert again.action is not first.action
    other = simulation.run((0, 1), agent.snapshot(), reset=True)
    assert (other.action != action).any()


def test_rollouts_use_the_policy_from_before_the_previous_update(
    tmp_path: Path,
) -> None:
    ends = [run(tmp_path / str(i), OVERLAP, Maker(eights)).agent for i in range(2)]
    np.testing.assert_array_equal(parameters(ends[0]), parameters(ends[1]))
    deviations = [row["ratio_deviation"] for row in rows_of(tmp_path / "0")]
    assert deviations[0] < 1e-5
    assert min(deviations[1:]) > 1e-5
    without = run(tmp_path / "without", maker=Maker(eights)).agent
    assert (parameters(without) != parameters(ends[0])).any()


def test_envs_step_while_an_update_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update waits for the last step of the next rollout."""
    maker, update, asked = Maker(eights), Updater.update, threading.Event()
    steps, updates = iter(range(1, 65)), itertools.count()

    def waiting(self: Updater, *arguments: Any, **named: Any) -> dict[str, float]:
        if next(updates) < 3:
            assert asked.wait(60)
            asked.clear()
        return update(self, *arguments, **named)

    def on_step() -> None:
        if (number := next(steps)) > 8 and number % 8 == 0:
            asked.set()

    monkeypatch.setattr(Updater, "update", waiting)
    assert run(tmp_path / "run", OVERLAP, maker, on_step=on_step).is_finished
    assert len(maker.made[0].actions) == 32


def test_resumed_run_has_the_same_parameters_as_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    config, maker = OVERLAP.replace(checkpoint_every=16), Maker(eights)
    straight = run(tmp_path / "run", config, maker).agent
    # The state of a run that was killed in its third iteration.
    for iteration in (3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"{iteration:08d}")
    resumed = run(tmp_path / "run", config, maker, resume=True).agent
    np.testing.assert_array_equal(parameters(straight), parameters(resumed))
    assert [row["iteration"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("overlap", [False, True])
def test_checkpoint_is_written_when_envs_fail(tmp_path: Path, overlap: bool) -> None:
    calls: list[int] = []

    def on_step() -> None:
        calls.append(1)
        if len(calls) == 20:  # in the third rollout
            raise EnvError("gone")

    with pytest.raises(EnvError, match="gone"):
        run(tmp_path / "run", SMALL.replace(overlap=overlap), on_step=on_step)
    assert len(calls) == 20
    assert counters(tmp_path / "run").iteration == 2
    assert [row["iteration"] for row in rows_of(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("overlap", [False, True])
def test_interrupt_during_a_rollout_writes_no_checkpoint(
    tmp_path: Path, overlap: bool
) -> None:
    calls: list[int] = []

    def on_step() -> None:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt

    config = SMALL.replace(overlap=overlap)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", config, on_step=on_step)
    assert len(calls) == 12
    saved = RunFolder(tmp_path / "run").has_checkpoint()
    assert saved is not overlap  # with overlap, step 12 is in the first iteration


def test_a_stop_during_an_update_waits_for_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Updater.update

    class Hanging(CountingBatchEnv):
        def step(self, actions: np.ndarray, out: Any = None) -> Any:
            if len(self.actions) == 20:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            return super().step(actions, out)

    def slow(self: Updater, *arguments: Any, **named: Any) -> dict[str, float]:
        metrics = update(self, *arguments, **named)
        time.sleep(0.3)
        return metrics

    monkeypatch.setattr(Updater, "update", slow)
    config = OVERLAP.replace(checkpoint_every=0)
    maker = Maker(lambda num_envs: Hanging([8] * num_envs))
    # The envs never reply, so the listener may stop the run several times.
    with StopSignals(is_waiting=lambda: True, stalled_seconds=0.05) as stop:
        result = run(tmp_path / "run", config, maker, should_stop=stop.has_fired)
    assert not result.is_finished
    assert counters(tmp_path / "run") == (2, 32)


@pytest.mark.parametrize("overlap", [False, True])
def test_diverged_update_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    update = Updater.update

    def diverging(self: Updater, *arguments: Any, **named: Any) -> dict[str, float]:
        if named["progress"] > 0.4:
            raise DivergedError("too far")
        return update(self, *arguments, **named)

    monkeypatch.setattr(Updater, "update", diverging)
    with pytest.raises(DivergedError, match="too far"):
        run(tmp_path / "run", SMALL.replace(overlap=overlap))
    assert counters(tmp_path / "run").iteration == 2
    assert [row["iteration"] for row in rows_of(tmp_path / "run")] == [1, 2]
