"""The guarantees that every lane gives, tested through a BatchEnv."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envserve.client import BatchEnv
from envserve.envs.seeding import env_seed, spare_seed
from envserve.errors import ActionError, CallError, LocalProtocolError
from envserve.lane import mark_harmless
from envserve.spaces.env_spec import spaces_equal
from envserve.spaces.leaves import flatten
from tests.oracle.ledger_env import ledger_hash
from tests.oracle.probe_envs import SPACES

from .conftest import MakeBatch, local_ipc_or_tcp
from .pool_driver import FAULTY, LEDGER
from .stalls import fastest

lane_kind = local_ipc_or_tcp
#: Run a test with and without spare envs.
with_and_without_spares = pytest.mark.parametrize(
    "spare_envs", [False, True], ids=["", "spares"]
)


def zeros(batch: BatchEnv) -> np.ndarray[Any, Any]:
    return np.zeros(batch.num_envs, np.int64)


# Spaces.


def test_every_kind_of_space_makes_the_round_trip(make_batch: MakeBatch) -> None:
    for name, space in SPACES.items():
        batch = make_batch("envserve/Echo-v0", 2, 1, seed=0, env_kwargs={"space": name})
        assert spaces_equal(batch.observation_space, space), name
        assert spaces_equal(batch.action_space, space), name
        (seen_space, _) = batch.get_attr("action_space")
        if isinstance(space, spaces.Box):
            restored: Any
            for restored in (batch.observation_space, batch.action_space, seen_space):
                assert restored.is_bounded() == space.is_bounded(), name
        first = batch.reset()
        if isinstance(space, spaces.Dict):
            assert list(first) == list(space.spaces), "the order of its keys"
        for leaf, array in zip(
            batch.spec.observation_leaves, flatten(space, first), strict=True
        ):
            assert array.shape == (2, *leaf.shape), name
            assert array.dtype == leaf.dtype, name
        result = batch.step(first)
        assert result.valid.all(), (name, result.infos)
        for sent, seen in zip(
            flatten(space, first), flatten(space, result.observation), strict=True
        ):
            np.testing.assert_array_equal(sent, seen)
            assert sent.dtype == seen.dtype
        batch.close()


# Steps and episodes.


def test_rewards_and_hashes_follow_from_the_actions_of_their_row(
    make_batch: MakeBatch, random_generator: np.random.Generator
) -> None:
    batch = make_batch(LEDGER, 5, 2, seed=3, env_kwargs={"length": 7})
    observation = batch.reset()
    hashes = [0] * 5
    for _ in range(30):
        actions = random_generator.integers(0, 1000, 5)
        result = batch.step(actions)
        np.testing.assert_array_equal(result.reward, actions)
        hashes = [ledger_hash(h, int(a)) for h, a in zip(hashes, actions, strict=True)]
        ended = (result.terminated | result.truncated)[:, None]
        last = np.where(ended, result.final_observation, result.observation)
        assert last[:, 3].tolist() == hashes
        np.testing.assert_array_equal(result.observation[:, 0], observation[:, 0])


def test_an_ended_episode_returns_its_last_observation_and_the_next_first_one(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch.and_reset(LEDGER, 3, 2, env_kwargs={"length": 2})
    first = batch.step(zeros(batch))
    assert not first.terminated.any()
    assert not first.final_observation.any()
    second = batch.step(zeros(batch))
    assert second.terminated.all()
    assert not second.truncated.any()
    assert second.final_observation[:, 1:3].tolist() == [[0, 2]] * 3
    assert second.observation[:, 1:3].tolist() == [[1, 0]] * 3
    batch.step(zeros(batch))
    fourth = batch.step(zeros(batch))
    assert fourth.truncated.all()
    assert not fourth.terminated.any()


def test_next_step_autoreset_resets_in_the_step_after_the_end(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(LEDGER, 2, 1, env_kwargs={"length": 2}, autoreset="next_step")
    batch.reset()
    batch.step(zeros(batch))
    last = batch.step(zeros(batch))
    assert last.terminated.all()
    assert last.observation[:, 1:3].tolist() == [[0, 2]] * 2
    reset = batch.step(np.full(2, 9))
    assert reset.observation[:, 1:3].tolist() == [[1, 0]] * 2
    assert reset.reward.tolist() == [0.0, 0.0]
    assert not (reset.terminated | reset.truncated).any()


def test_disabled_autoreset_requires_a_reset_of_ended_envs(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch(LEDGER, 2, 1, env_kwargs={"length": 2}, autoreset="disabled")
    batch.reset()
    batch.step(zeros(batch))
    last = batch.step(zeros(batch))
    assert last.terminated.all()
    assert last.observation[:, 1:3].tolist() == [[0, 2]] * 2
    with pytest.raises(LocalProtocolError, match=r"\[0, 1\] have ended"):
        batch.step(zeros(batch))
    batch.reset([0])
    with pytest.raises(LocalProtocolError, match=r"\[1\] have ended"):
        batch.step(zeros(batch))
    batch.reset([1])
    assert batch.step(zeros(batch)).observation[:, 2].tolist() == [1, 1]


def test_reset_of_a_subset_leaves_the_other_rows_alone(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 5, 2, seed=1)
    assert batch.reset()[:, 0].tolist() == [env_seed(1, row, 0) for row in range(5)]
    batch.step(zeros(batch))
    observation = batch.reset([3, 1])
    assert observation[:, 1:3].tolist() == [[1, 0], [1, 0]]
    assert observation[:, 0].tolist() == [env_seed(1, 3, 0), env_seed(1, 1, 0)]
    result = batch.step(zeros(batch))
    assert result.observation[:, 2].tolist() == [2, 1, 2, 1, 2]


def test_given_seeds_reach_their_rows(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 4, 2)
    assert batch.reset(seeds=[5, 6, 7, 8])[:, 0].tolist() == [5, 6, 7, 8]
    assert batch.reset([2, 0], seeds=[9, 10])[:, 0].tolist() == [9, 10]


def test_results_are_copies_unless_arrays_are_passed(make_batch: MakeBatch) -> None:
    batch = make_batch.and_reset(LEDGER, 2, 1)
    first = batch.step(np.array([1, 2]))
    kept = first.observation.copy()
    batch.step(np.array([3, 4]))
    np.testing.assert_array_equal(first.observation, kept)
    assert first.reward.tolist() == [1.0, 2.0]
    result = batch.step(np.array([5, 6]), out=first)
    assert result.reward is first.reward
    assert first.reward.tolist() == [5.0, 6.0]
    assert first.observation[:, 2].tolist() == [3, 3]


def test_infos_are_reported_at_the_end_of_episodes_always_or_never(
    make_batch: MakeBatch,
) -> None:
    seen = {}
    for mode in ("episode_end", "all", "none"):
        batch = make_batch.and_reset(LEDGER, 2, 1, env_kwargs={"length": 2}, infos=mode)
        seen[mode] = [batch.step(zeros(batch)).infos for _ in range(2)]
        batch.close()
    assert seen["none"] == [{}, {}]
    assert seen["episode_end"][0] == {}
    assert seen["episode_end"][1][1]["step"] == 2
    assert seen["episode_end"][1][0]["reset_info"] == {"reset_of_episode": 1}
    weights = seen["all"][0][0]["weights"]
    assert weights.dtype == np.float32
    assert weights.tolist() == [1.0, 1.0]


def test_splits_group_the_blocks_of_every_worker(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 8, 2, num_splits=2)
    blocks = batch.lanes[0].blocks
    assert [(b.start, b.stop, b.worker, b.split) for b in blocks] == [
        (0, 2, 0, 0),
        (2, 4, 1, 0),
        (4, 6, 0, 1),
        (6, 8, 1, 1),
    ]
    batch.reset()
    assert batch.step(zeros(batch)).observation[:, 2].tolist() == [1] * 8


# Actions.


def test_wrong_actions_step_nothing(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 3, 2)
    with pytest.raises(LocalProtocolError, match=r"reset\(\)"):
        batch.step(zeros(batch))
    batch.reset()
    with pytest.raises(ActionError, match=r"expected shape \[3\]"):
        batch.step(np.zeros((3, 2), np.int64))
    with pytest.raises(ActionError, match=r"Env 2.*in \[0, 999\]; got 1000"):
        batch.step(np.array([0, 999, 1000]))
    with pytest.raises(ActionError, match=r"Env 0.*got -1"):
        batch.step(np.array([-1, 0, 0]))
    with pytest.raises(ActionError, match="expected int64; got float64"):
        batch.step(np.full(3, 0.5))
    result = batch.step(np.array([1, 2, 3]))
    assert result.observation[:, 2].tolist() == [1, 1, 1]
    assert result.observation[:, 3].tolist() == [ledger_hash(0, a) for a in (1, 2, 3)]


# Spare envs.


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
def test_the_two_envs_of_a_row_alternate(
    make_batch: MakeBatch, random_generator: np.random.Generator, autoreset: str
) -> None:
    batch = make_batch(
        LEDGER,
        5,
        2,
        seed=3,
        env_kwargs={"length": 3},
        autoreset=autoreset,
        spare_envs=True,
    )
    own = [env_seed(3, row, 0) for row in range(5)]
    seeds = np.array([own, [spare_seed(seed) for seed in own]])
    hashes = np.zeros((2, 5), object)
    assert batch.reset()[:, 0].tolist() == own
    for episode in range(6):
        env = episode % 2
        for _ in range(3):
            actions = random_generator.integers(0, 1000, 5)
            result = batch.step(actions)
            np.testing.assert_array_equal(result.reward, actions)
            for row, action in enumerate(actions):
                hashes[env, row] = ledger_hash(hashes[env, row], int(action))
            ended = (result.terminated | result.truncated)[:, None]
            last = np.where(ended, result.final_observation, result.observation)
            assert last[:, 3].tolist() == list(hashes[env])
            assert last[:, 0].tolist() == seeds[env].tolist()
            assert (last[:, 1] == episode // 2).all()
        assert ended.all()
        first = result.observation
        if autoreset == "next_step":
            first = batch.step(np.full(5, 9)).observation
        elif autoreset == "disabled":
            first = batch.reset()
        assert first[:, 0].tolist() == seeds[1 - env].tolist()
        assert (first[:, 2] == 0).all()


def test_seeds_of_a_reset_also_seed_the_spares(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 3, 2, env_kwargs={"length": 1}, spare_envs=True)
    batch.reset()
    batch.step(zeros(batch))
    assert batch.reset([2, 0], seeds=[8, 9])[:, 0].tolist() == [8, 9]
    for expected in ([spare_seed(9), spare_seed(8)], [9, 8]):
        result = batch.step(zeros(batch))
        assert result.observation[[0, 2], 0].tolist() == expected


def test_set_attributes_apply_to_later_episodes(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 2, 1, env_kwargs={"length": 1}, spare_envs=True)
    batch.reset()
    for _ in range(2):
        batch.set_attr("difficulty", [4, 5])
        batch.step(zeros(batch))
        assert batch.get_attr("difficulty") == [4, 5]
        batch.step(zeros(batch))
        assert batch.get_attr("difficulty") == [4, 5]


# Attributes.


@with_and_without_spares
def test_attributes_are_called_and_set(make_batch: MakeBatch, spare_envs: bool) -> None:
    batch = make_batch.and_reset(
        LEDGER, 3, 2, env_kwargs={"render_mode": "rgb_array"}, spare_envs=spare_envs
    )
    assert batch.get_attr("render_mode") == ["rgb_array"] * 3
    assert batch.get_attr("difficulty") == [1, 1, 1]
    batch.set_attr("difficulty", [4, 5, 6])
    assert batch.get_attr("difficulty") == [4, 5, 6]
    echo = batch.call(1, "echo", 1, "two", {"three": np.arange(3)}, None)
    assert echo[:2] == [1, "two"]
    assert echo[2]["three"].tolist() == [0, 1, 2]
    assert echo[3] is None
    batch.step(zeros(batch))
    image = batch.render(2)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, np.ones((2, 3, 3)))


def test_an_exception_of_a_call_contains_its_traceback(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 2, 1)
    text = r"Env 1 \(.+\): complain: ValueError: too dark"
    with pytest.raises(CallError, match=text) as caught:
        batch.call(1, "complain", "too dark")
    assert "raise ValueError(text)\nValueError: too dark" in str(caught.value)
    assert caught.value.env_index == 1
    batch.reset()
    assert batch.step(zeros(batch)).valid.all()


def test_unknown_attributes_are_errors(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 2, 1)
    for name in ("_private", "__class__", "no_such_thing"):
        with pytest.raises(CallError, match=name):
            batch.call(0, name)


def test_an_env_index_out_of_range_is_an_error(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 2, 1)
    with pytest.raises(IndexError, match=r"\[0, 2\); got \[2\]"):
        batch.call(2, "echo")
    with pytest.raises(IndexError, match="distinct env indices"):
        batch.reset([1, 1])


# Interrupted calls, and closing the batch.


@with_and_without_spares
def test_an_interrupted_call_does_not_affect_the_next(
    make_batch: MakeBatch, spare_envs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch.and_reset(LEDGER, 3, 2, spare_envs=spare_envs)
    with monkeypatch.context() as patch:

        def interrupt(*_: Any) -> list[Any]:
            error = KeyboardInterrupt()
            mark_harmless(error)  # as if the lane had only been waiting
            raise error

        patch.setattr(batch.lanes[0], "collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batch.step(np.array([1, 2, 3]))
    result = batch.step(np.array([4, 5, 6]))
    assert result.reward.tolist() == [4.0, 5.0, 6.0]
    assert result.observation[:, 2].tolist() == [2, 2, 2]


def test_closing_does_not_wait_for_an_env_that_hangs(make_batch: MakeBatch) -> None:
    batches: list[BatchEnv] = []

    def attempt() -> float:
        kwargs = {"fault": "hang"}
        batches.append(make_batch.and_reset(FAULTY, 2, 2, env_kwargs=kwargs))
        batches[-1].send(np.array([1, 0]))
        start = time.monotonic()
        batches[-1].close()
        return time.monotonic() - start

    assert fastest(attempt, 2.0) < 2.0
    batch = batches[-1]
    with pytest.raises(LocalProtocolError, match="closed"):
        batch.step(zeros(batch))
    batch.close()


def test_a_batch_has_a_readable_repr(make_batch: MakeBatch) -> None:
    batch = make_batch(LEDGER, 3, 2)
    assert repr(batch).startswith("<BatchEnv envserve/Ledger-v0, 3 envs: 3 ")
    batch.close()
    assert repr(batch).endswith("; closed>")
