"""`EpisodeTracker`: completed and lost episodes across rollouts."""

import numpy as np
import pytest

from ppo.errors import EnvsLostError
from ppo.rollout import Episode, EpisodeTracker, LostSteps, Rollout
from ppo.simulate import Simulation
from tests.ppo.fakes import CountingBatchEnv, in_graph
from tests.ppo.runs import rollout_of
from tests.ppo.test_simulate import echo


def test_episodes_across_rollouts_are_returned_in_order_of_time() -> None:
    fake = CountingBatchEnv([2, 5])
    simulation = Simulation(in_graph(fake), echo, horizon=3)
    tracker = EpisodeTracker(2)
    assert tracker.add(simulation.run((0, 0))) == [Episode(0, 2.0, 2)]
    assert tracker.add(simulation.run((0, 1))) == [
        Episode(0, 2.0, 2),
        Episode(1, 5.0, 5),
        Episode(0, 2.0, 2),
    ]


def test_episode_with_a_lost_step_is_not_counted() -> None:
    fake = CountingBatchEnv([3], lost=frozenset({(1, 0)}))
    simulation = Simulation(in_graph(fake), echo, horizon=6)
    # Steps 0 and 1 belong to the lost episode; the next episode takes steps 2 to 4.
    assert EpisodeTracker(1).add(simulation.run((0, 0))) == [Episode(0, 3.0, 3)]


def rollout_of_flags(valid: str, done: str) -> Rollout:
    """Return a rollout of one env with reward 1; "x" means true."""
    flags = [np.array([[mark == "x"] for mark in marks]) for marks in (valid, done)]
    ones = np.ones((len(valid), 1))
    return rollout_of(len(valid), reward=ones, valid=flags[0], truncated=flags[1])


def test_episode_that_continued_during_padding_is_not_counted() -> None:
    tracker = EpisodeTracker(1)
    assert tracker.add(rollout_of_flags("xx..x", "....x")) == []
    assert tracker.consecutive_lost.tolist() == [1]
    assert tracker.add(rollout_of_flags("xx", ".x")) == [Episode(0, 2.0, 2)]
    assert tracker.consecutive_lost.tolist() == [0]


def test_padding_before_a_lost_episode_is_not_counted_as_another_loss() -> None:
    tracker = EpisodeTracker(1)
    assert tracker.add(rollout_of_flags("x...", "...x")) == []
    assert tracker.add(rollout_of_flags("x.", "..")) == []
    assert tracker.consecutive_lost.tolist() == [1]


def test_iterations_with_few_valid_steps_do_not_end_training_if_others_follow() -> None:
    lost_steps = LostSteps(horizon=10)
    for lost in 2 * [*9 * [95], 10]:
        lost_steps.add(lost, 100)


def test_training_ends_if_no_env_completes_an_episode() -> None:
    lost_steps = LostSteps(horizon=10)
    lost_steps.add(10, 100, 49)
    with pytest.raises(EnvsLostError, match="every env has lost its last 50 episodes"):
        lost_steps.add(10, 100, 50)
