"""Completed episodes across rollouts."""

from ppo.episodes import Episode, EpisodeTracker
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.simulate import Simulation
from tests.ppo.fakes import CountingBatchEnv, as_batch_env
from tests.ppo.test_simulate import echo


def test_episodes_are_found_across_rollouts_in_order_of_time() -> None:
    fake = CountingBatchEnv([2, 5])
    simulation = Simulation(InGraphBatchEnv(as_batch_env(fake)), echo, horizon=3)
    tracker = EpisodeTracker(2)
    assert tracker.add(simulation.run((0, 0))) == [Episode(0, 2.0, 2)]
    assert tracker.add(simulation.run((0, 1))) == [
        Episode(0, 2.0, 2),
        Episode(1, 5.0, 5),
        Episode(0, 2.0, 2),
    ]


def test_an_episode_that_lost_a_step_does_not_count() -> None:
    fake = CountingBatchEnv([3], lost=frozenset({(1, 0)}))
    simulation = Simulation(InGraphBatchEnv(as_batch_env(fake)), echo, horizon=6)
    # Steps 0 and 1 belong to the lost episode; the next one takes steps 2 to 4.
    assert EpisodeTracker(1).add(simulation.run((0, 0))) == [Episode(0, 3.0, 3)]
