"""Benchmarks that need TensorFlow: a tiny run of each, and their calculations.

One benchmark runs its cases in separate processes, as users do. The others run them in
this process, which has already loaded TensorFlow.
"""

import threading

import numpy as np
import pytest

from benchmarks.cli import main
from benchmarks.harness import Skip
from benchmarks.learning.overlap import Pieces
from benchmarks.learning.profile import longest_worker
from benchmarks.learning.rollouts import load_tensorflow
from benchmarks.learning.train import Gate
from ppo.errors import BadInputError
from tests.benchmarks.conftest import Bench, measure_here
from tests.benchmarks.conftest import bench as bench

TINY = ("--seconds", "0.02", "--repetitions", "1", "--num-envs", "2", "--workers", "2")
CARTPOLE = ("--env", "CartPole-v1", "--horizon", "4")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run benchmark cases in this process."""
    for module in ("command", "learning.overlap"):
        monkeypatch.setattr(f"benchmarks.{module}.measure_cases", measure_here)
    for module in ("goal", "overlap", "rollouts", "train"):
        monkeypatch.setattr(
            f"benchmarks.learning.{module}.load_tensorflow", lambda: None
        )


def test_simulate_is_compared_with_stepping_alone(bench: Bench) -> None:
    only = ("--only", "simulate()", "--only", "BatchEnv")
    rows = bench("simulate", *TINY, *CARTPOLE, *only)["table"]["rows"]
    assert [row[0] for row in rows] == [
        "BatchEnv.step alone",
        "simulate()",
        "simulate(), policy in TensorFlow",
    ]
    assert rows[0][-1] == "1.00"


@pytest.mark.usefixtures("in_this_process")
def test_stalls_compares_values_of_act_on(bench: Bench) -> None:
    tiny = ("--servers", "4", "--envs-per-server", "2", "--horizon", "8")
    rows = bench("stalls", *tiny, "--seconds", "0.1", *("--repetitions", "1"))["table"]
    assert [row[0] for row in rows["rows"]] == [
        "no stalls, act_on 1",
        "no stalls, act_on 0.25",
        "stalls, act_on 1",
        "stalls, act_on 0.25",
    ]


@pytest.mark.usefixtures("in_this_process")
def test_profile_reports_the_time_of_each_part(bench: Bench) -> None:
    result = bench("profile", *TINY, *CARTPOLE, "--transport", "ipc")
    parts = [row[0] for row in result["table"]["rows"]]
    assert parts == [
        *("policy", "rollout", "client", "workers and wake-ups", "envs"),
        "server and transport",
    ]
    assert "bound" in result["notes"][-1]


@pytest.mark.usefixtures("in_this_process")
def test_overlap_compares_one_and_two_splits(bench: Bench) -> None:
    small = ("--env-milliseconds", "0.2", "--policy-milliseconds", "0.2")
    result = bench("overlap", *TINY, "--horizon", "4", *small)
    assert list(result["medians"])[-2:] == ["1 split", "2 splits"]
    assert result["results"]["pieces"]["env"] > 200


@pytest.mark.usefixtures("in_this_process")
def test_train_reports_rollout_and_update_times(bench: Bench) -> None:
    small = ("--num-envs", "2", "--workers", "2", "--minibatch-size", "4")
    once = ("--repetitions", "1", "--iterations", "2", "--epochs", "1")
    result = bench("train", *CARTPOLE, *small, *once, "--only", "ppo")
    for name in ("ppo", "ppo, tcp server"):
        ours = result["medians"][name]
        assert 0 < ours["rollout_seconds"] < ours["total_seconds"]
        assert 0 < ours["update_seconds"] < ours["total_seconds"]


@pytest.mark.usefixtures("in_this_process")
def test_sac_measures_both_trainers(bench: Bench) -> None:
    # With several threads on a busy machine, torch mostly waits for their barriers.
    once = ("--repetitions", "1", "--torch-threads", "1")
    result = bench("sac", "--steps", "32", "--workers", "2", *once)
    speeds = {name: one["steps_per_second"] for name, one in result["medians"].items()}
    assert set(speeds) == {"ppo, SAC", "SB3, SAC"}
    assert min(speeds.values()) > 1


@pytest.mark.usefixtures("in_this_process")
def test_goal_ends_the_training_at_the_target_return(bench: Bench) -> None:
    small = ("--max-steps", "6144", "--workers", "2", "--repetitions", "1")
    easy = bench("goal", *small, "--target", "15", "--only", "ppo")["medians"]["ppo"]
    assert easy["mean_return"] >= 15
    assert easy["steps"] < 6_144
    hard = bench("goal", *small, "--target", "501", "--only", "ppo")
    assert hard["medians"]["ppo"]["steps"] == 6_144
    assert hard["table"]["rows"][0][-2] == "0 of 1"


def test_an_unknown_goal_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["goal", "--task", "humanoid"])
    assert caught.value.code == 2


def test_without_tensorflow_cases_are_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(**threads: int) -> None:
        raise BadInputError("Training needs TensorFlow: pip install 'envserve[train]'.")

    monkeypatch.setattr("benchmarks.learning.rollouts.start_tensorflow", start)
    with pytest.raises(Skip, match="needs TensorFlow"):
        load_tensorflow()


@pytest.mark.parametrize(
    ("cores", "policy", "num_envs", "env", "expected"),
    [
        (2, 1.0, 16, 1.0, 9.0),  # 2 cores share all work: (16 + 2) / 2
        (4, 1.0, 16, 1.0, 8.0),  # the 8 envs of one worker
        (4, 5.0, 16, 1.0, 10.0),  # the policy of both splits, sequentially
        # With one env per worker, each worker steps one split, after its policy.
        (8, 1.5, 2, 1.0, 3.0),
        (8, 1.5, 2, 4.0, 5.5),
    ],
)
def test_best_time_with_two_splits_is_the_largest_bound(
    cores: int, policy: float, num_envs: int, env: float, expected: float
) -> None:
    assert pieces(policy, num_envs, cores, env).best_with_two_splits() == expected


def test_best_time_with_one_split_is_the_sum_of_policy_and_envs() -> None:
    assert pieces(1.0, 16, 2).best_with_one_split() == 10.0
    assert pieces(1.0, 16, 1).best_with_one_split() == 18.0  # workers share a core


def pieces(policy: float, num_envs: int, cores: int, env: float = 1.0) -> Pieces:
    return Pieces(
        env=env,
        policy_per_split=policy,
        policy_all_rows=2 * policy,
        num_envs=num_envs,
        workers=2,
        cores=cores,
    )


def test_longest_worker_considers_the_slowest_worker_and_the_cores() -> None:
    spent = np.array([1.0, 2.0, 3.0, 4.0])
    assert longest_worker(spent, workers=2, cores=2) == 7.0
    assert longest_worker(spent, workers=4, cores=2) == 5.0


def test_a_gate_lets_the_requested_number_of_iterations_pass() -> None:
    gate, threads = Gate(), []

    def train() -> None:
        while not gate.is_closed:
            threads.append(threading.current_thread())
            gate.arrive()

    with gate.run_in_thread(train):
        gate.let_pass(1)
        assert len(threads) == 1
        gate.let_pass(3)
        assert len(threads) == 4
    assert threading.current_thread() not in threads


def test_a_gate_raises_the_exception_of_the_training() -> None:
    def train() -> None:
        raise ZeroDivisionError

    gate = Gate()
    with gate.run_in_thread(train), pytest.raises(ZeroDivisionError):
        gate.let_pass(1)
