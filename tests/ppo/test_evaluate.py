"""Evaluation: exact numbers of complete episodes, without a bias towards short ones.

Evaluations during training play the same episodes each time, and do not affect
training.
"""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from envserve.errors import EnvsBusy
from envserve.text import rounded
from ppo.agent.agent import Agent
from ppo.config.named_configs import CONFIGS
from ppo.environments import env_maker
from ppo.errors import EnvsLostError
from ppo.evaluation.evaluate import (
    Evaluation,
    PeriodicEvaluator,
    evaluate,
    evaluation_seed,
    mode_remark,
)
from ppo.run_folder import checkpoint
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics import is_due
from ppo.train import Progress, train
from tests.ppo.fakes import (
    ACTIONS,
    BOX,
    CountingBatchEnv,
    ScriptedBatchEnv,
    as_batch_env,
)
from tests.ppo.runs import (
    SMALL,
    Maker,
    counters,
    eagerly,
    no_retracing,
    parameters,
    ppo,
    rows_of,
    run,
    save_run,
)

pytestmark = pytest.mark.usefixtures("one_launcher")

CONFIG = SMALL.replace(evaluate_every=32, checkpoint_every=0, checkpoint_seconds=1e9)


def evaluating(
    evaluation: Callable[[int], CountingBatchEnv] = lambda number: CountingBatchEnv(
        [3, 5]
    ),
) -> Maker:
    """Return a function that creates the training envs, then the evaluation envs."""
    return Maker(evaluation=evaluation)


def played(fake: CountingBatchEnv, episodes: int) -> Evaluation:
    return evaluate(Agent(BOX, ACTIONS, SMALL), as_batch_env(fake), episodes)


@pytest.mark.parametrize(
    ("lengths", "lost", "expected"),
    [
        # The first seven episodes to end would have lengths 2 and 7 only.
        ([2, 130, 7], (), [2, 2, 2, 130, 130, 7, 7]),
        ([5, 4, 3], (), [5, 4]),
        # A lost episode is played again.
        ([4, 4], [(1, 0)], [4, 4, 4, 4]),
        # An env that has finished its quota may fail.
        ([130, 4], [(step, 1) for step in range(4, 1000)], [130, 4]),
    ],
)
def test_every_env_plays_its_quota_regardless_of_episode_lengths(
    lengths: list[int], lost: Sequence[tuple[int, int]], expected: list[int]
) -> None:
    fake = CountingBatchEnv(lengths, lost=frozenset(lost))
    evaluation = played(fake, len(expected))
    assert evaluation.lengths.tolist() == expected
    assert evaluation.returns.tolist() == expected
    assert evaluation.mean_return == pytest.approx(np.mean(expected))


def test_evaluation_uses_modes_and_does_not_update_statistics() -> None:
    subject = Agent(BOX, ACTIONS, SMALL)
    subject.preprocess.update(np.arange(8.0).reshape(4, 2), tf.ones([4], tf.bool))
    before = subject.preprocess(tf.constant([[1.0, 2.0]], tf.float64)).numpy()
    fake = CountingBatchEnv([3])
    evaluate(subject, as_batch_env(fake), 1)
    after = subject.preprocess(tf.constant([[1.0, 2.0]], tf.float64)).numpy()
    np.testing.assert_array_equal(before, after)
    mode, _ = subject.mode(tf.constant([[0.0, 0.0]], tf.float64), tf.constant([0, 0]))
    np.testing.assert_allclose(fake.actions[0], mode.numpy(), atol=1e-7)
    np.testing.assert_array_equal(fake.actions[0], fake.actions[3])


def test_the_recurrent_state_is_reset_at_episode_ends() -> None:
    subject = Agent(BOX, ACTIONS, SMALL.replace(recurrent_size=3))
    for variable in subject.trainable_variables:
        variable.assign(variable + 0.3)
    fake = CountingBatchEnv([3])
    evaluate(subject, as_batch_env(fake), 2)
    state = tf.zeros([1, 3])
    for step in range(6):
        if step % 3 == 0:
            state = tf.zeros([1, 3])
        observation = tf.constant([[0.0, step % 3]], tf.float64)
        action, _, state = subject.mode(observation, tf.constant([0, 0]), state)
        expected = np.clip(action.numpy(), -1.0, 1.0)
        np.testing.assert_allclose(fake.actions[step], expected, atol=1e-6)


def test_the_number_of_episodes_has_the_right_form() -> None:
    one, two = (Evaluation(np.ones(number), np.ones(number)) for number in (1, 2))
    assert "over 1 episode (lowest" in str(one)
    assert "over 2 episodes (lowest" in str(two)


def test_returns_below_1_have_three_digits() -> None:
    returns = np.array([0.0, 0.9876, 12.345, -0.05]), np.ones(4)
    text = "mean return 3.3 over 4 episodes (lowest -0.05, highest 12.3)"
    assert text in str(Evaluation(*returns))
    returns = np.array([0.8765, 0.8123]), np.ones(2)
    text = "mean return 0.844 over 2 episodes (lowest 0.812, highest 0.876)"
    assert text in str(Evaluation(*returns))
    assert rounded(float(np.std([0.3] * 3))) == "0.0"  # except for a rounding error


def test_sampled_actions_differ_in_each_step_and_are_reproducible() -> None:
    subject = Agent(BOX, ACTIONS, SMALL)
    actions = []
    for seed in (1, 1, 2):
        fake = CountingBatchEnv([150, 150])
        result = evaluate(subject, as_batch_env(fake), 2, actions="sample", seed=seed)
        assert result.as_dict()["actions"] == "sample"
        assert "over 2 episodes with sampled actions" in str(result)
        actions.append(np.array(fake.actions[:150]))
    np.testing.assert_array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[0], actions[2])
    assert len(np.unique(actions[0])) > 250  # of 300; some are clipped to the bounds


@pytest.mark.parametrize("actions", ["mode", "sample"])
def test_the_config_chooses_the_actions_of_evaluations_during_training(
    actions: str,
) -> None:
    config = CONFIG.replace(evaluation_actions=actions, curve_episodes=1)
    maker = Maker(lambda num_envs: CountingBatchEnv([60]))
    evaluator = PeriodicEvaluator(Agent(BOX, ACTIONS, config), config, maker)
    assert evaluator.evaluate().actions == actions
    # The most likely actions of this agent hardly depend on the observation.
    assert bool(np.std(maker.made[0].actions) > 0.1) is (actions == "sample")


def test_ppo_evaluate_samples_actions_and_compares_modes_with_training(
    tmp_path: Path,
) -> None:
    config = CONFIG.replace(env_name="CartPole-v1", evaluation_episodes=2)
    save_run(tmp_path, config)
    row = json.dumps({"steps": 100, "mean_return": 400.0})
    (tmp_path / "metrics.jsonl").write_text(f"{row}\n")
    arguments = ("evaluate", tmp_path, "--num-workers", 1)
    for option, actions in (((), "mode"), (("--sampled",), "sample")):
        code, output, error = ppo(*arguments, *option)
        assert code == 0, error
        assert ("400 with sampled actions in" in output) is (actions == "mode")
        assert (" with sampled actions (" in output) is (actions == "sample")
        saved = json.loads((tmp_path / "evaluation.json").read_text())
        assert saved["actions"] == actions


@pytest.mark.parametrize(
    ("trained", "settings", "is_worse"),
    [
        (0.9, {}, True),
        (0.9, {"training_time_limit": 5}, False),
        (0.11, {}, False),  # within the noise of the evaluation
        (-0.5, {}, False),
        (None, {}, False),
    ],
)
def test_a_line_names_the_option_if_modes_earn_much_less_than_samples(
    tmp_path: Path, trained: float | None, settings: dict[str, int], is_worse: bool
) -> None:
    folder = RunFolder(tmp_path)
    rows = [{"steps": 1, "mean_return": trained}, {"steps": 3, "mean_return": 9.0}]
    folder.metrics_path.write_text("\n".join(map(json.dumps, rows)))
    returns = np.array([0.0, 0.2])
    evaluation = Evaluation(returns, np.array([8, 8]), steps=2)
    remark = mode_remark(evaluation, CONFIG.replace(**settings), folder)
    assert bool(remark) is is_worse
    if is_worse:
        assert "0.1 with the most likely actions" in remark
        assert (
            "0.9 with sampled actions in training; try `ppo evaluate --sampled`"
            in remark
        )
    assert not mode_remark(evaluation._replace(actions="sample"), CONFIG, folder)


def test_endless_episodes_are_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    """An env whose episode was cut off plays its other episodes after a reset."""
    fake = CountingBatchEnv([3, 450])
    subject = Agent(BOX, ACTIONS, SMALL)
    evaluation = evaluate(subject, as_batch_env(fake), 5, time_limit=300)
    assert evaluation.lengths.tolist() == [3, 3, 3, 300, 300]
    assert evaluation.returns.tolist() == [3, 3, 3, 300, 300]
    assert str(evaluation).endswith("; 2 did not end and were cut off")
    (record,) = caplog.records
    assert re.search(
        r"^fake: an episode .* 300 steps \(evaluation_time_limit\).*no time limit, "
        r"train with .*"
        r"--set 'wrappers=\[{name = \"TimeLimit\"",
        record.message,
    )
    assert played(CountingBatchEnv([200]), 4).lengths.tolist() == [200] * 4


def test_an_evaluation_in_which_no_episode_ends_is_short() -> None:
    fake = CountingBatchEnv([10**9, 10**9])
    subject = Agent(BOX, ACTIONS, SMALL)
    evaluation = evaluate(subject, as_batch_env(fake), 100, time_limit=250)
    assert evaluation.lengths.tolist() == [300, 300]
    assert len(fake.actions) == 300


def test_an_env_that_is_never_available_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ppo.evaluation.evaluate._MAX_IDLE_STEPS", 100)
    fake = ScriptedBatchEnv([".T", "P"])
    with pytest.raises(
        EnvsLostError, match=r"3 episodes, but 1 env did not .* last 300 steps"
    ):
        evaluate(Agent(BOX, ACTIONS, SMALL), as_batch_env(fake), 3, time_limit=200)


def test_an_env_that_always_fails_is_an_error() -> None:
    lost = frozenset((step, 1) for step in range(1000) if step % 3 == 2)
    fake = CountingBatchEnv([4, 4], lost=lost)
    with pytest.raises(EnvsLostError, match=r"Env 1 .* each of the last 33 had a lost"):
        played(fake, 2)


def test_is_due_when_steps_reach_a_multiple() -> None:
    ends = range(0, 120, 12)
    due = [b for a, b in itertools.pairwise(ends) if is_due(30, a, b)]
    assert due == [36, 60, 96]
    assert is_due(5, 3, 31)
    assert not is_due(0, 3, 31)
    assert not is_due(30, 30, 59)


def test_evaluation_metrics_are_in_the_rows_of_their_iterations(tmp_path: Path) -> None:
    maker = evaluating()
    run(tmp_path, CONFIG.replace(total_steps=80), maker)
    found = rows_of(tmp_path)
    # Every 32 steps, and after the last iteration.
    evaluated = [row["steps"] for row in found if "evaluation_return" in row]
    assert evaluated == [32, 64, 80]
    last = found[-1]
    assert last["evaluation_return"] == pytest.approx(11 / 3)
    assert last["evaluation_return_std"] == pytest.approx(np.std([3, 3, 5]))
    assert last["evaluation_length"] == pytest.approx(11 / 3)
    assert last["evaluation_seconds"] > 0
    assert all(env.is_closed for env in maker.made)
    # All have the same seed, which training and the final evaluation do not use.
    assert [num_envs for num_envs, _ in maker.asked] == [2, 2, 2, 2]
    assert maker.trained == [True, False, False, False]
    assert len({seed for _, seed in maker.asked[1:]}) == 1
    assert maker.asked[1][1] not in (CONFIG.seed, evaluation_seed(CONFIG.seed))


def test_evaluations_do_not_affect_the_training(tmp_path: Path) -> None:
    # Real envs, with several splits and episodes that span several rollouts.
    config = CONFIGS["cartpole"].replace(
        total_steps=512,
        num_envs=4,
        horizon=32,
        minibatch_size=128,
        epochs=1,
        evaluation_episodes=2,
        curve_episodes=6,
        jit_compile=False,
    )
    agents, metrics = [], []
    for every in (0, 100):
        chosen = config.replace(evaluate_every=every)
        run_folder = RunFolder.create(tmp_path / str(every), chosen)
        with eagerly():
            result = train(chosen, run_folder, env_maker(chosen, num_workers=1))
        assert result.steps == 512
        agents.append(result.agent)
        metrics.append(rows_of(run_folder.path))
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


def test_evaluation_time_does_not_count_as_training_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 0.0}

    def evaluation(number: int) -> CountingBatchEnv:
        clock["now"] += 1000.0  # the time in which envs start
        return CountingBatchEnv([3, 5])

    def tick() -> float:
        clock["now"] += 1.0
        return clock["now"]

    monkeypatch.setattr("ppo.train.time.perf_counter", tick)
    run(tmp_path, CONFIG, evaluating(evaluation))
    rows = rows_of(tmp_path)
    assert [row["steps_per_second"] > 1 for row in rows] == [True] * 4
    assert [row["evaluation_seconds"] > 1000 for row in rows[1::2]] == [True] * 2
    assert not any("evaluation_seconds" in row for row in rows[::2])


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    config = CONFIG.replace(total_steps=96, evaluate_every=16, checkpoints_to_keep=1)
    lengths = [0, 4, 9, 5, 9, 2, 1]  # of the episodes in each evaluation
    maker = evaluating(lambda number: CountingBatchEnv([lengths[number]] * 2))
    checkpoints = tmp_path / "checkpoints"
    result = run(tmp_path, config, maker)
    assert result.curve == tuple(zip(range(16, 97, 16), lengths[1:], strict=True))
    assert result.mean_return == 3.0
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["00000002", "00000006"]
    assert checkpoint.best_return(checkpoints) == 9.0
    # A resumed run compares its evaluations with the best earlier evaluation.
    maker = evaluating(lambda number: CountingBatchEnv([8 + number] * 2))
    seen: list[float] = []

    def end_a_trial(progress: Progress) -> None:
        seen.append(progress.metrics["evaluation_return"])
        if progress.steps == 128:
            raise InterruptedError("as pruned")

    longer = config.replace(total_steps=128)
    with pytest.raises(InterruptedError, match="as pruned"):
        run(tmp_path, longer, maker, resume=True, on_progress=end_a_trial)
    assert seen == [9.0, 10.0]
    assert all(env.is_closed for env in maker.made)
    assert checkpoint.best_return(checkpoints) == 10.0
    assert checkpoint.checkpoint_at(checkpoints, "best").name == "00000008"


def test_a_resumed_run_keeps_the_evaluation_schedule(tmp_path: Path) -> None:
    run(tmp_path, CONFIG, evaluating(), should_stop=lambda: True)
    assert "evaluation_return" not in rows_of(tmp_path)[-1]
    run(tmp_path, CONFIG, evaluating(), resume=True)
    rows = rows_of(tmp_path)
    assert [r["steps"] for r in rows if "evaluation_return" in r] == [32, 64]


def test_repeated_evaluations_are_traced_once() -> None:
    agent = Agent(BOX, ACTIONS, CONFIG)
    maker = evaluating()
    maker(num_envs=2, seed=0)  # as a training run would
    evaluator = PeriodicEvaluator(agent, CONFIG, maker)
    assert evaluator.evaluate().lengths.tolist() == [3, 3, 5]
    with no_retracing("distribution"):
        for _ in range(2):
            assert evaluator.evaluate().lengths.tolist() == [3, 3, 5]


@pytest.mark.parametrize(
    ("episodes", "num_envs", "expected"),
    [(20, 16, 10), (20, 64, 20), (3, 2, 2), (1, 16, 1), (100, 16, 15)],
)
def test_an_evaluation_uses_no_more_envs_than_necessary(
    episodes: int, num_envs: int, expected: int
) -> None:
    config = CONFIG.replace(num_envs=num_envs, curve_episodes=episodes, total_steps=999)
    maker = Maker()
    evaluation = PeriodicEvaluator(Agent(BOX, ACTIONS, config), config, maker)
    assert len(evaluation.evaluate().returns) == episodes
    assert maker.asked[0][0] == expected
    assert len(maker.asked) == 1


def test_busy_servers_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    def refuse(number: int) -> CountingBatchEnv:
        raise EnvsBusy("0 of 16 envs are free")

    with pytest.raises(EnvsBusy, match="0 of 16") as caught:
        run(tmp_path, CONFIG, evaluating(refuse))
    assert "need 2 additional envs" in caught.value.__notes__[0]
    # The progress of the run is saved and reported.
    assert counters(tmp_path) == (2, 32)
    assert [row["steps"] for row in rows_of(tmp_path)] == [16, 32]


def test_env_failures_in_an_evaluation_end_the_run_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    lost = frozenset((step, b) for step in range(100) for b in range(2))
    maker = evaluating(lambda number: CountingBatchEnv([3, 5], lost=lost))
    with pytest.raises(EnvsLostError, match="had a lost step"):
        run(tmp_path, CONFIG, maker)
    assert counters(tmp_path) == (2, 32)
    assert all(env.is_closed for env in maker.made)


def test_an_interrupt_ends_an_evaluation_at_once(tmp_path: Path) -> None:
    maker = evaluating()

    def interrupt() -> None:
        if len(maker.made) == 2 and len(maker.made[1].actions) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, CONFIG, maker, on_step=interrupt)
    assert len(maker.made[1].actions) == 7
    assert all(env.is_closed for env in maker.made)
