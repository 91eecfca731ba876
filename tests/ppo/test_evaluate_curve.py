"""Evaluations on the way: the same episodes every time, at no cost to the training."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.errors import EnvsBusy
from ppo.agent import Agent
from ppo.config import Config
from ppo.configs import CONFIGS
from ppo.environments import env_maker
from ppo.errors import EnvsLostError
from ppo.evaluate import CurveEvaluator, evaluation_seed
from ppo.run_folder import checkpoint
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.report import is_due
from ppo.train import train
from tests.ppo.fakes import ACTIONS, BOX, CountingBatchEnv, as_batch_env

CONFIG = Config(
    env_name="fake",
    num_envs=2,
    horizon=8,
    total_steps=64,
    epochs=1,
    minibatch_size=8,
    policy_layers=(4,),
    value_layers=(4,),
    evaluate_every=32,
    curve_episodes=3,
    checkpoint_seconds=1e9,
    jit_compile=False,  # compiling takes longer than these few updates
)


class Maker:
    """Makes the envs of the training first, and then those of each evaluation."""

    def __init__(
        self,
        evaluation: Callable[[int], CountingBatchEnv] = lambda number: CountingBatchEnv(
            [3, 5]
        ),
    ) -> None:
        self.made: list[CountingBatchEnv] = []
        self.asked: list[tuple[int, int]] = []
        self._evaluation = evaluation

    def __call__(self, *, num_envs: int, seed: int) -> BatchEnv:
        number = len(self.made)
        self.asked.append((num_envs, seed))
        assert all(env.is_closed for env in self.made[1:])
        env = self._evaluation(number) if number else CountingBatchEnv([3] * num_envs)
        self.made.append(env)
        return as_batch_env(env)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def parameters(agent: Agent) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in agent.trainable_variables])


def test_something_is_due_whenever_a_multiple_is_reached() -> None:
    ends = range(0, 120, 12)
    due = [b for a, b in itertools.pairwise(ends) if is_due(30, a, b)]
    assert due == [36, 60, 96]
    assert is_due(5, 3, 31)
    assert not is_due(0, 3, 31)
    assert not is_due(30, 30, 59)


def test_evaluations_are_in_the_rows_of_their_iterations(tmp_path: Path) -> None:
    maker = Maker()
    config = CONFIG.replace(total_steps=80)
    train(config, RunFolder.create(tmp_path / "run", config), maker)
    found = rows(tmp_path / "run")
    # Every 32 steps, and after the last iteration.
    evaluated = [row["steps"] for row in found if "evaluation_return" in row]
    assert evaluated == [32, 64, 80]
    last = found[-1]
    assert last["evaluation_return"] == pytest.approx(11 / 3)
    assert last["evaluation_return_std"] == pytest.approx(np.std([3, 3, 5]))
    assert last["evaluation_length"] == pytest.approx(11 / 3)
    assert last["evaluation_episodes"] == 3
    assert last["evaluation_seconds"] > 0
    assert all(env.is_closed for env in maker.made)
    # The same seeds every time, and neither the training's nor the last evaluation's.
    assert [num_envs for num_envs, _ in maker.asked] == [2, 2, 2, 2]
    assert len({seed for _, seed in maker.asked[1:]}) == 1
    assert maker.asked[1][1] not in (CONFIG.seed, evaluation_seed(CONFIG.seed))


def test_evaluating_changes_nothing_of_the_training(tmp_path: Path) -> None:
    # Real envs, with several splits and episodes that run on from rollout to rollout.
    config = CONFIGS["cartpole"].replace(
        total_steps=512,
        num_envs=4,
        horizon=32,
        epochs=2,
        evaluation_episodes=2,
        curve_episodes=6,
        jit_compile=False,
    )
    agents, metrics = [], []
    for every in (0, 100):
        chosen = config.replace(evaluate_every=every)
        run_folder = RunFolder.create(tmp_path / str(every), chosen)
        result = train(chosen, run_folder, env_maker(chosen, num_workers=1))
        assert result.steps == 512
        agents.append(result.agent)
        metrics.append(rows(run_folder.path))
    np.testing.assert_array_equal(parameters(agents[0]), parameters(agents[1]))
    observation = np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)
    np.testing.assert_array_equal(
        agents[0].preprocess(observation), agents[1].preprocess(observation)
    )
    assert [row["mean_return"] for row in metrics[0]] == [
        row["mean_return"] for row in metrics[1]
    ]
    assert "evaluation_return" not in metrics[0][-1]
    assert sum("evaluation_return" in row for row in metrics[1]) == 4


def test_time_for_evaluations_is_not_time_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 0.0}

    def evaluation(number: int) -> CountingBatchEnv:
        clock["now"] += 1000.0  # so long do the envs take to start
        return CountingBatchEnv([3, 5])

    def tick() -> float:
        clock["now"] += 1.0
        return clock["now"]

    monkeypatch.setattr("ppo.train.time.perf_counter", tick)
    train(CONFIG, RunFolder.create(tmp_path / "run", CONFIG), Maker(evaluation))
    found = rows(tmp_path / "run")
    assert [row["steps_per_second"] > 1 for row in found] == [True] * 4
    assert [row.get("evaluation_seconds", 0) > 1000 for row in found] == [
        False,
        True,
        False,
        True,
    ]


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    config = CONFIG.replace(
        total_steps=96, evaluate_every=16, checkpoints_to_keep=1, num_envs=2
    )
    lengths = [0, 4, 9, 5, 9, 2, 1]  # of the episodes of each evaluation
    maker = Maker(lambda number: CountingBatchEnv([lengths[number]] * 2))
    run_folder = RunFolder.create(tmp_path / "run", config)
    train(config, run_folder, maker)
    names = sorted(path.name for path in run_folder.checkpoints.iterdir())
    assert names == ["00000002", "00000006"]
    assert checkpoint.best_return(run_folder.checkpoints) == 9.0
    # Resumed, it knows what is to be beaten.
    longer = config.replace(total_steps=128)
    maker = Maker(lambda number: CountingBatchEnv([8 + number] * 2))
    train(longer, run_folder, maker, resume=True)
    assert checkpoint.best_return(run_folder.checkpoints) == 10.0
    best = checkpoint.checkpoint_at(run_folder.checkpoints, "best")
    assert best.name == "00000008"


def test_a_resumed_run_evaluates_when_the_other_one_would_have(tmp_path: Path) -> None:
    run_folder = RunFolder.create(tmp_path / "run", CONFIG)
    train(CONFIG, run_folder, Maker(), should_stop=lambda: True)
    assert "evaluation_return" not in rows(tmp_path / "run")[-1]
    train(CONFIG, run_folder, Maker(), resume=True)
    evaluated = [
        row["steps"] for row in rows(tmp_path / "run") if "evaluation_return" in row
    ]
    assert evaluated == [32, 64]


def test_an_evaluation_is_traced_once() -> None:
    agent = Agent(BOX, ACTIONS, CONFIG)
    maker = Maker()
    maker(num_envs=2, seed=0)  # as a training would
    evaluator = CurveEvaluator(agent, CONFIG, maker)
    simulations = []
    for _ in range(3):
        assert evaluator.evaluate().lengths.tolist() == [3, 3, 5]
        simulations.append(evaluator._simulation)
    assert simulations[0] is simulations[2]
    assert simulations[0] is not None
    assert simulations[0].num_traces == 1


@pytest.mark.parametrize(
    ("episodes", "num_envs", "expected"),
    [(20, 16, 10), (20, 64, 20), (3, 2, 2), (1, 16, 1), (100, 16, 15)],
)
def test_no_more_envs_are_asked_for_than_have_something_to_do(
    episodes: int, num_envs: int, expected: int
) -> None:
    config = CONFIG.replace(
        num_envs=num_envs, curve_episodes=episodes, total_steps=9999
    )
    asked = []

    def make_env(*, num_envs: int, seed: int) -> BatchEnv:
        asked.append(num_envs)
        return as_batch_env(CountingBatchEnv([3] * num_envs))

    evaluation = CurveEvaluator(Agent(BOX, ACTIONS, config), config, make_env)
    assert len(evaluation.evaluate().returns) == episodes
    assert asked == [expected]


def test_servers_without_room_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    def refuse(number: int) -> CountingBatchEnv:
        raise EnvsBusy("0 of 16 envs are free")

    run_folder = RunFolder.create(tmp_path / "run", CONFIG)
    with pytest.raises(EnvsBusy, match="0 of 16") as caught:
        train(CONFIG, run_folder, Maker(refuse))
    assert "take 2 envs besides those of the training" in caught.value.__notes__[0]
    # What was learned is saved, and reported.
    assert checkpoint.read_counters(run_folder.checkpoints) == (2, 32)
    assert [row["steps"] for row in rows(tmp_path / "run")] == [16, 32]


def test_envs_that_fail_in_an_evaluation_end_the_run_but_lose_nothing(
    tmp_path: Path,
) -> None:
    lost = frozenset((step, b) for step in range(100) for b in range(2))
    maker = Maker(lambda number: CountingBatchEnv([3, 5], lost=lost))
    run_folder = RunFolder.create(tmp_path / "run", CONFIG)
    with pytest.raises(EnvsLostError, match="lost in a row"):
        train(CONFIG, run_folder, maker)
    assert checkpoint.read_counters(run_folder.checkpoints) == (2, 32)
    assert all(env.is_closed for env in maker.made)


def test_an_interrupt_ends_an_evaluation_at_once(tmp_path: Path) -> None:
    maker = Maker()

    def interrupt() -> None:
        if len(maker.made) == 2 and len(maker.made[1].actions) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            CONFIG, RunFolder.create(tmp_path / "run", CONFIG), maker, on_step=interrupt
        )
    assert len(maker.made[1].actions) == 7
    assert all(env.is_closed for env in maker.made)
