"""Means of the numbers in the infos of completed episodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from envserve.client import BatchEnv
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.rollout import Episode, EpisodeTracker, info_means, num_non_finite
from ppo.run_folder.metrics import ReportWindow, tensorboard_tag
from ppo.simulate import Simulation
from tests.envserve.server_process import ServerProcess
from tests.ppo import failing_env, informing_env
from tests.ppo.fakes import CountingBatchEnv, in_graph
from tests.ppo.runs import rollout_of, two_lanes
from tests.ppo.test_simulate import echo

NUM_ENVS = 4
MODULES = (informing_env.__name__,)


def episode_with(**info: Any) -> Episode:
    return Episode(0, 0.0, 1, info)


def test_means_are_over_the_episodes_that_have_the_number() -> None:
    episodes = [
        episode_with(
            success=True, term=1.0, text="x", array=np.ones(2), nested={"a": 1}
        ),
        episode_with(success=np.bool_(False), term=np.float32(np.nan)),
        Episode(0, 0.0, 1),
        episode_with(success=False, term=np.int8(2), huge=np.inf, nothing=None),
    ]
    assert info_means(episodes) == {
        "info/success": pytest.approx(1 / 3),
        "info/term": 1.5,
    }
    assert info_means([]) == {}


def test_there_are_at_most_32_means() -> None:
    means = info_means(
        [episode_with(**{f"n{number:03}": number for number in range(50)})]
    )
    assert list(means) == [f"info/n{number:03}" for number in range(32)]


def test_info_of_a_lost_episode_is_ignored() -> None:
    fake = CountingBatchEnv(
        [3, 4],
        lost=frozenset({(1, 0), (5, 1)}),
        make_info=lambda step, b: {"step": step, "row": b},
    )
    simulation = Simulation(in_graph(fake), echo, horizon=6)
    tracker = EpisodeTracker(2)
    infos = [
        (each.env_index, each.info)
        for _ in range(2)
        for each in tracker.add(simulation.run((0, 0)), simulation.infos)
    ]
    assert infos == [
        (1, {"step": 3, "row": 1}),
        (0, {"step": 4, "row": 0}),
        (0, {"step": 7, "row": 0}),
        (1, {"step": 9, "row": 1}),
        (0, {"step": 10, "row": 0}),
    ]


def test_rows_with_nan_or_infinity_are_counted_apart_from_other_faults() -> None:
    batch = BatchEnv.local(
        f"{failing_env.__file__}:Diverging",
        num_envs=2,
        num_workers=1,
        env_kwargs={"row": "{row}"},
        nonfinite="mask",
    )
    with batch:
        batch.reset()
        infos: dict[tuple[int, int], Any] = {}
        valid = np.ones((6, 2), np.bool_)
        for step in range(6):
            result = batch.step(np.zeros(2, np.int64))
            valid[step] = result.valid
            infos |= {(step, row): info for row, info in result.infos.items()}
    assert len(infos) == 4
    assert num_non_finite(rollout_of(6, 2, valid=valid), infos) == 2


def local() -> BatchEnv:
    name, modules = informing_env.NAME, MODULES
    return BatchEnv.local(name, NUM_ENVS, 2, seed=3, import_modules=modules)


def completed_episodes(batch: BatchEnv) -> list[Episode]:
    def act(observation: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = observation.shape[0]
        return tf.zeros([rows], tf.int64), tf.zeros([rows])

    with batch:
        simulation = Simulation(InGraphBatchEnv(batch), act, 6)
        tracker = EpisodeTracker(NUM_ENVS)
        episodes = [
            episode
            for seed in range(2)
            for episode in tracker.add(simulation.run((0, seed)), simulation.infos)
        ]
    return [each._replace(info=info_means([each])) for each in episodes]


def test_infos_are_the_same_with_splits_lanes_and_servers(tmp_path: Path) -> None:
    expected = completed_episodes(local())
    assert len(expected) >= 8
    for episode in expected:
        assert {"info/success", "info/number", "info/level"} <= episode.info.keys()
    assert any("info/only_some" in episode.info for episode in expected)
    lanes = two_lanes(informing_env.NAME, NUM_ENVS, import_modules=MODULES)
    assert completed_episodes(lanes) == expected
    with ServerProcess(tmp_path, informing_env.NAME, "--import", *MODULES) as server:
        remote = BatchEnv.connect(
            informing_env.NAME, [server.address], num_envs=NUM_ENVS, seed=3
        )
        assert completed_episodes(remote) == expected


def test_row_of_metrics_contains_the_newest_mean_in_the_group_info() -> None:
    window = ReportWindow()
    for mean in (0.5, 0.75):
        seconds = {"rollout_seconds": 1.0, "update_seconds": 1.0}
        window.add(1, {"info/success": mean, **seconds})
    assert window.take()["info/success"] == 0.75
    assert tensorboard_tag("info/success") == "info/success"
