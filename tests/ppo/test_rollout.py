"""Rollouts: completed episodes across them."""

import numpy as np

from ppo.rollout import Episode, EpisodeTracker, Rollout
from ppo.simulate import Simulation
from tests.ppo.fakes import CountingBatchEnv, in_graph
from tests.ppo.runs import rollout_of
from tests.ppo.test_simulate import echo


def test_episodes_are_found_across_rollouts_in_order_of_time() -> None:
    fake = CountingBatchEnv([2, 5])
    simulation = Simulation(in_graph(fake), echo, horizon=3)
    tracker = EpisodeTracker(2)
    assert tracker.add(simulation.run((0, 0))) == [Episode(0, 2.0, 2)]
    assert tracker.add(simulation.run((0, 1))) == [
        Episode(0, 2.0, 2),
        Episode(1, 5.0, 5),
        Episode(0, 2.0, 2),
    ]


def test_an_episode_that_lost_a_step_does_not_count() -> None:
    fake = CountingBatchEnv([3], lost=frozenset({(1, 0)}))
    simulation = Simulation(in_graph(fake), echo, horizon=6)
    # Steps 0 and 1 belong to the lost episode; the next one takes steps 2 to 4.
    assert EpisodeTracker(1).add(simulation.run((0, 0))) == [Episode(0, 3.0, 3)]


def marked(valid: str, done: str) -> Rollout:
    """One env that earns 1 in each step; "x" stands for true."""
    flags = [np.array([[mark == "x"] for mark in marks]) for marks in (valid, done)]
    ones = np.ones((len(valid), 1))
    return rollout_of(len(valid), reward=ones, valid=flags[0], truncated=flags[1])


def test_an_episode_that_went_on_during_padding_does_not_count() -> None:
    tracker = EpisodeTracker(1)
    assert tracker.add(marked("xx..x", "....x")) == []
    assert tracker.consecutive_lost.tolist() == [1]
    assert tracker.add(marked("xx", ".x")) == [Episode(0, 2.0, 2)]
    assert tracker.consecutive_lost.tolist() == [0]


def test_padding_before_a_loss_is_not_a_loss_of_its_own() -> None:
    tracker = EpisodeTracker(1)
    assert tracker.add(marked("x...", "...x")) == []
    assert tracker.add(marked("x.", "..")) == []
    assert tracker.consecutive_lost.tolist() == [1]
