"""SAC: replay buffer, targets, spaces, resume."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from ppo.agent.actions.distributions import SquashedGaussian
from ppo.algorithms.sac.replay_buffer import ReplayBuffer
from ppo.algorithms.sac.sac import SAC
from ppo.config import Config
from ppo.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    UnsupportedSpaceError,
)
from tests.ppo.fakes import ACTIONS, BOX, CountingBatchEnv
from tests.ppo.runs import Maker, eagerly, rollout_of, rows_of, run
from tests.ppo.sac_in_numpy import Reference

CONFIG = Config(
    env_name="fake",
    algorithm="sac",
    num_envs=2,
    horizon=8,
    total_steps=96,
    report_every=0,
    policy_layers=(8,),
    value_layers=(8,),
    evaluation_episodes=3,
    jit_compile=False,
).replace(batch_size=8, random_steps=24, updates_per_step=0.25)


def test_replay_stores_valid_transitions_and_final_observations() -> None:
    observation = np.arange(10.0).reshape(5, 1, 2)
    done = np.array([[False], [True], [False], [False]])
    rollout = rollout_of(
        4,
        observation=observation,
        final_observation=np.full((4, 1, 2), -1.0),
        reward=np.arange(4.0)[:, None],
        truncated=done,
        valid=np.array([[True], [True], [False], [True]]),
    )
    replay = ReplayBuffer(capacity=4)
    replay.add(rollout)
    assert replay.size == 3
    rows = replay.sample((20, 8), (1, 2))
    assert rows["observation"].shape == (20, 8, 2)
    following = {0.0: 2.0, 1.0: -1.0, 3.0: 8.0}  # by reward; 2.0 is invalid
    assert set(rows["reward"].ravel()) == following.keys()
    for reward, after in following.items():
        where = rows["reward"] == reward
        assert set(rows["observation"][where][:, 0]) == {2.0 * reward}
        assert set(rows["next_observation"][where][:, 0]) == {after}
    replay.add(rollout._replace(reward=rollout.reward + 10.0))
    assert replay.size == 4  # the newest transitions replace the oldest
    assert set(replay.sample((20, 8), (1, 2))["reward"].ravel()) == {3, 10, 11, 13}
    np.testing.assert_array_equal(rollout.observation, observation)


def test_replay_that_does_not_fit_into_memory_is_an_error_with_a_size_that_does() -> (
    None
):
    with pytest.raises(ConfigError, match=r"replay_size: .* GiB .* set replay_size="):
        ReplayBuffer(10**12).add(rollout_of(1))


@pytest.mark.parametrize(("terminated", "expected"), [(True, 1.0), (False, 2.0)])
def test_value_ends_at_termination_and_continues_after_truncation(
    terminated: bool, expected: float
) -> None:
    """Every step is rewarded with 1; with a discount of 0.5, the sum of all is 2."""
    config = CONFIG.replace(
        discount=0.5, tau=1.0, learning_rate=0.01, initial_temperature=1e-6
    ).replace(updates_per_step=4, random_steps=0)
    sac = SAC(SAC.make_agent(BOX, ACTIONS, config), config)
    ends = np.ones((8, 2), np.bool_)
    rollout = rollout_of(
        8, 2, reward=np.ones((8, 2)), terminated=ends & terminated, truncated=ends
    )
    for seed in range(8):
        metrics = sac.learn(rollout, progress=0.0, seed=(seed, 0))
    assert metrics["value"] == pytest.approx(expected, abs=0.15)


@eagerly()
def test_a_loss_that_is_not_finite_is_an_error() -> None:
    config = CONFIG.replace(random_steps=0)
    sac = SAC(SAC.make_agent(BOX, ACTIONS, config), config)
    rollout = rollout_of(8, 2, reward=np.full((8, 2), 1e30))  # its square overflows
    with pytest.raises(DivergedError, match="expected finite losses, got"):
        sac.learn(rollout, progress=0.0, seed=(0, 0))


def test_updates_equal_their_recomputation(
    random_generator: np.random.Generator,
) -> None:
    config = CONFIG.replace(
        activation="tanh", discount=0.9, learning_rate=0.03, initial_log_std=-0.5
    ).replace(tau=0.1, replay_size=20, initial_temperature=0.5, random_steps=0)
    actions = spaces.Box(np.float32(0), np.array([10, 3], np.float32))
    sac = SAC(SAC.make_agent(BOX, actions, config), config)
    layers = sac.agent.trackables["policy"].layers
    networks = [layers, *sac.trackables["critics"], *sac.trackables["targets"]]
    reference = Reference(config, [network.get_weights() for network in networks])
    for seed in [(1, 2), (3, 4)]:
        terminated, truncated, invalid = random_generator.random((3, 8, 2)) < 0.2
        rollout = rollout_of(
            8,
            2,
            observation=random_generator.normal(size=(9, 2, 2)),
            final_observation=random_generator.normal(size=(8, 2, 2)),
            action=random_generator.normal(size=(8, 2, 2)).astype(np.float32),
            reward=random_generator.normal(size=(8, 2)),
            terminated=terminated,
            truncated=truncated & ~terminated,
            valid=~invalid,
        )
        metrics = sac.learn(rollout, progress=0.0, seed=seed)
        reference.add(rollout)

        def noise_of(step: int, seed: tuple[int, int] = seed) -> np.ndarray:
            folded = tf.random.experimental.stateless_fold_in(seed, step)
            return tf.random.stateless_normal([2, 8, 2], folded).numpy()

        samples = np.random.default_rng(seed).integers(
            sac.replay_buffer.size, size=(4, 8)
        )
        means = reference.learn(samples, noise_of)
        np.testing.assert_allclose([*metrics.values()], means, rtol=1e-4, atol=1e-5)
    assert sac.replay_buffer.size == 20
    for network, expected in zip(networks, reference.networks, strict=True):
        for weights, array in zip(network.get_weights(), expected, strict=True):
            np.testing.assert_allclose(weights, array, rtol=1e-3, atol=1e-4)
    temperature = sac.trackables["log_temperature"].numpy()
    assert temperature == pytest.approx(reference.log_temperature[0], abs=1e-5)


@pytest.mark.parametrize(
    ("observations", "actions", "message"),
    [
        (
            BOX,
            spaces.Discrete(3),
            r"sac: expected a Box .*Discrete\(3\).*algorithm=ppo",
        ),
        (BOX, spaces.Box(-np.inf, np.inf, (1,)), "finite bounds"),
        (spaces.Box(0, 255, (36, 36, 3), np.uint8), ACTIONS, "without images"),
    ],
)
def test_unsupported_spaces_are_rejected(
    observations: Any, actions: Any, message: str
) -> None:
    with pytest.raises(UnsupportedSpaceError, match=message):
        SAC.make_agent(observations, actions, CONFIG)


class Mine(SAC):
    """A subclass, whose config has the defaults of PPO."""


def test_subclass_has_the_policy_of_sac() -> None:
    config = Config(env_name="fake", algorithm=f"{__name__}:Mine")
    Mine.check(config)
    agent = Mine.make_agent(BOX, ACTIONS, config)
    policy = agent.distribution(agent.preprocess(np.array([[0.0, 1.0], [2.0, 3.0]])))
    assert isinstance(policy, SquashedGaussian)
    assert policy.log_std.shape == (2, 1)  # depends on the observation
    for changes in ({"recurrent_size": 8, "minibatch_size": 128}, {"network": "cnn"}):
        with pytest.raises(ConfigError, match="expected the network mlp"):
            Mine.check(config.replace(**changes))


@pytest.mark.parametrize("limit", [{"replay_size": 23}, {"total_steps": 32}])
def test_random_steps_that_prevent_all_training_are_an_error(
    limit: dict[str, int],
) -> None:
    SAC.check(CONFIG)
    with pytest.raises(ConfigError, match="random_steps: expected at most"):
        SAC.check(CONFIG.replace(random_steps=33).replace(**limit))


def add_rewards(replay: ReplayBuffer, first: int, end: int) -> None:
    """Add transitions with the rewards `first` to `end - 1`."""
    reward = np.arange(first, end, dtype=float)[:, None]
    observation = np.arange(first, end + 1.0)[:, None, None]
    replay.add(
        rollout_of(
            end - first, reward=reward, observation=np.tile(observation, (1, 1, 2))
        )
    )


def rewards_in(replay: ReplayBuffer) -> set[float]:
    """Return the rewards in a buffer, after checking that each row is consistent."""
    rows = replay.sample((50, 10), (1, 2))
    observation = np.tile(rows["reward"][..., None], (1, 1, 2))
    np.testing.assert_array_equal(rows["observation"], observation)
    np.testing.assert_array_equal(rows["next_observation"], observation + 1)
    return set(rows["reward"].ravel())


def test_a_loaded_replay_has_the_newest_transitions_of_its_checkpoint(
    tmp_path: Path, random_generator: np.random.Generator
) -> None:
    """A run is killed at random moments: between saves, and after a save without a
    checkpoint."""
    for capacity in (5, 16, 200):
        folder = tmp_path / str(capacity)
        replay, steps, checkpoint = ReplayBuffer(capacity), 0, 0
        for _ in range(60):
            action = random_generator.integers(5)
            if action == 0:
                replay.save(folder)
                checkpoint = steps
            elif action == 1:
                if is_saved := random_generator.random() < 0.5:
                    replay.save(folder)
                replay, steps = ReplayBuffer(capacity), checkpoint
                replay.load(folder, steps)
                assert replay.size == min(steps, capacity), is_saved
            else:
                end = steps + int(random_generator.integers(1, 8))
                add_rewards(replay, steps, end)
                steps = end
                expected = range(max(0, steps - capacity), steps)
                assert rewards_in(replay) <= set(expected)
                assert replay.size == len(expected)
        for _ in range(2):  # the first save keeps what the preceding one needs
            replay.save(folder)
        loaded = ReplayBuffer(capacity)
        loaded.load(folder, steps)
        for each in (replay, loaded):
            add_rewards(each, steps, steps + 1)
        sampled = [each.sample((9, 9), (1, 2))["reward"] for each in (replay, loaded)]
        np.testing.assert_array_equal(*sampled)
        assert loaded.size == min(steps + 1, capacity)
        assert max(rewards_in(loaded)) == steps
        firsts = [int(path.name[13:25]) for path in folder.iterdir()]
        assert min(firsts) > steps - capacity  # files with older transitions are gone


def test_a_save_keeps_the_transitions_of_the_preceding_checkpoint(
    tmp_path: Path,
) -> None:
    replay = ReplayBuffer(5)
    for first, end in ((0, 10), (10, 17)):  # no transition of the first save is left
        add_rewards(replay, first, end)
        replay.save(tmp_path)
    loaded = ReplayBuffer(5)
    loaded.load(tmp_path, 10)  # killed before the second checkpoint was complete
    assert loaded.size == 5
    add_rewards(loaded, 10, 11)
    assert rewards_in(loaded) == set(range(6, 11))


def test_a_saved_file_and_its_name_are_flushed_to_disk(
    tmp_path: Path, flushed_inodes: list[int]
) -> None:
    replay = ReplayBuffer(100)
    add_rewards(replay, 0, 10)
    replay.save(tmp_path)
    (path,) = tmp_path.iterdir()
    assert flushed_inodes == [path.stat().st_ino, tmp_path.stat().st_ino]


def test_a_replay_without_all_of_its_files_has_the_transitions_after_the_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replay = ReplayBuffer(100)
    for first in (0, 10, 20, 30):
        add_rewards(replay, first, first + 10)
        replay.save(tmp_path)
    (tmp_path / "000000000010-000000000020.npz").unlink()
    loaded = ReplayBuffer(100)
    loaded.load(tmp_path, 40)
    assert "expected the last 40 transitions of the run, found 20" in caplog.text
    add_rewards(loaded, 40, 41)
    assert rewards_in(loaded) == set(range(20, 41))
    (tmp_path / "000000000030-000000000040.npz").unlink()
    older = ReplayBuffer(100)
    older.load(tmp_path, 40)
    add_rewards(older, 40, 50)
    older.save(tmp_path)
    loaded = ReplayBuffer(100)
    loaded.load(tmp_path, 50)
    add_rewards(loaded, 50, 51)
    assert rewards_in(loaded) == {*range(20, 30), *range(40, 51)}
    smaller = ReplayBuffer(15)
    smaller.load(tmp_path, 50)
    add_rewards(smaller, 50, 51)
    assert rewards_in(smaller) == {*range(26, 30), *range(40, 51)}


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "text", "pipe", "fewer", "bare", "zip"]
)
def test_a_damaged_file_of_a_replay_is_an_error_that_names_it(
    tmp_path: Path, damage: str
) -> None:
    replay = ReplayBuffer(100)
    add_rewards(replay, 0, 50)
    replay.save(tmp_path)
    path = tmp_path / "000000000000-000000000050.npz"
    content = path.read_bytes()
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    elif damage == "fewer":
        np.savez(path, np.zeros((49, 2)))
    elif damage == "bare":
        np.savez(path, np.zeros((50, 0)))
    elif damage == "zip":
        np.savez_compressed(path, np.zeros((50, 2)))
    else:
        cut = {"cut": content[:-600], "empty": b"", "text": b"transitions"}[damage]
        path.write_bytes(cut)
    with pytest.raises(CheckpointError, match=r"050\.npz: cannot read .* Remove "):
        ReplayBuffer(100).load(tmp_path, 50)


def test_saved_transitions_of_other_observations_are_an_error(tmp_path: Path) -> None:
    replay = ReplayBuffer(100)
    add_rewards(replay, 0, 50)
    replay.save(tmp_path)
    loaded = ReplayBuffer(100)
    loaded.load(tmp_path, 50)
    with pytest.raises(CheckpointError, match=r"expected transitions .* got .*\(3,\)"):
        loaded.add(
            rollout_of(
                4,
                observation=np.zeros((5, 1, 3)),
                final_observation=np.zeros((4, 1, 3)),
            )
        )


@pytest.mark.parametrize(
    ("overlap", "save_replay"), [(False, True), (True, True), (True, False)]
)
def test_resumed_run_continues_with_the_temperature_and_the_saved_replay(
    tmp_path: Path, overlap: bool, save_replay: bool
) -> None:
    config = CONFIG.replace(overlap=overlap, learning_rate=0.1, save_replay=save_replay)
    maker = Maker(lambda num_envs: CountingBatchEnv([3] * num_envs))
    run(tmp_path / "run", config.replace(total_steps=48), maker)
    run(tmp_path / "run", config, maker, resume=True)
    rows = rows_of(tmp_path / "run")
    sizes = [64, 80, 96] if save_replay else [16, 32, 48]
    assert [row["replay_transitions"] for row in rows] == [16, 32, 48, *sizes]
    assert "temperature" not in rows[0]
    assert ("temperature" in rows[3]) == save_replay
    temperatures = [row["temperature"] for row in rows if "temperature" in row]
    assert temperatures == sorted(temperatures, reverse=True)
    assert 1.0 > temperatures[0] > temperatures[-1]


def test_resumed_run_uses_its_new_learning_rate(tmp_path: Path) -> None:
    maker = Maker(lambda num_envs: CountingBatchEnv([3] * num_envs))
    run(tmp_path / "run", CONFIG.replace(learning_rate=0.1, total_steps=48), maker)
    run(tmp_path / "run", CONFIG.replace(learning_rate=0.0), maker, resume=True)
    before, *after = [row["temperature"] for row in rows_of(tmp_path / "run")[2:]]
    assert before > after[0] == after[1] == after[2]
