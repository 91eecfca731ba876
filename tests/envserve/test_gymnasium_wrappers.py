"""Gymnasium's wrappers, requested by name, behave as in docs/wrappers.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation, TransformReward

from envserve.envs.registry import make_env
from envserve.errors import EnvStartError
from envserve.wrappers.apply import wrap
from envserve.wrappers.registry import WRAPPERS
from envserve.wrappers.specs import WrapperSpec
from tests.envserve.scripted_env import episode_observations, scripted, wrapped


def test_wrappers_are_applied_in_their_order() -> None:
    inner_first = (
        WrapperSpec("ActionRepeat", {"amount": 2}),
        WrapperSpec("TimeLimit", {"max_episode_steps": 3}),
    )
    for specs, reward in ((inner_first, 11.0), (inner_first[::-1], 3.0)):
        env = wrap(scripted(range(9)), specs)
        env.reset()
        while not (last := env.step(0))[3]:
            pass
        assert last[1] == reward, specs


def test_rewards_of_repeated_actions_are_added_in_64_bits() -> None:
    env = TransformReward(scripted(range(9)), lambda _: np.float32(0.1))
    repeated = wrap(env, (WrapperSpec("RepeatAction", {"num_repeats": 3}),))
    repeated.reset()
    assert float(repeated.step(0)[1]) == sum([float(np.float32(0.1))] * 3)


def test_observations_can_be_cast_to_32_bits() -> None:
    env = wrap(
        scripted([[1.5], [2.5]], "float64"),
        (WrapperSpec("DtypeObservation", {"dtype": "float32"}),),
    )
    assert env.reset()[0].dtype == env.observation_space.dtype == np.float32


def test_integer_observations_are_not_rescaled() -> None:
    arguments = {"min_obs": -1, "max_obs": 1}
    with pytest.raises(EnvStartError, match="observations of floats"):
        wrapped(scripted([[0], [9]], "uint8"), "RescaleObservation", **arguments)
    specs = (
        WrapperSpec("DtypeObservation", {"dtype": "float32"}),
        WrapperSpec("RescaleObservation", arguments),
    )
    env = wrap(scripted([[0], [9]], "uint8"), specs)
    assert [seen.tolist() for seen in episode_observations(env)] == [[-1], [1]]


IMAGES = np.zeros((3, 8, 8, 3)).tolist()
#: For each wrapper: a suitable env, arguments, and the resulting observation shape.
USES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "ActionRepeat": ("CartPole-v1", {"amount": 2}, (4,)),
    "AddRenderObservation": ("images", {"render_only": True}, (8, 8, 3)),
    "ClipAction": ("Pendulum-v1", {}, (3,)),
    "ClipReward": ("CartPole-v1", {"min_reward": 0, "max_reward": 0.5}, (4,)),
    "DelayObservation": ("CartPole-v1", {"delay": 2}, (4,)),
    "DiscretizeAction": ("Pendulum-v1", {"bins": 5}, (3,)),
    "DiscretizeObservation": ("Pendulum-v1", {"bins": 5, "multidiscrete": True}, (3,)),
    "DtypeObservation": ("CartPole-v1", {"dtype": "float64"}, (4,)),
    "FlattenObservation": ("images", {}, (192,)),
    "FrameDelta": ("images", {}, (8, 8, 3)),
    "FrameHistory": ("images", {"past_indices": [1]}, (1, 8, 8, 3)),
    "FrameStackObservation": ("images", {"stack_size": 2}, (2, 8, 8, 3)),
    "GrayscaleObservation": ("images", {"keep_dim": True}, (8, 8, 1)),
    "MaxAndSkipObservation": ("images", {"skip": 2}, (8, 8, 3)),
    "NormalizeObservation": ("CartPole-v1", {"epsilon": 1e-6}, (4,)),
    "NormalizeReward": ("CartPole-v1", {"gamma": 0.9}, (4,)),
    "RandomStart": ("CartPole-v1", {"max_steps": 2}, (4,)),
    "RangeNormalize": ("Pendulum-v1", {}, (3,)),
    "RecordEpisodeStatistics": ("CartPole-v1", {"buffer_length": 9}, (4,)),
    "RepeatAction": ("CartPole-v1", {"num_repeats": 2}, (4,)),
    "RescaleAction": ("Pendulum-v1", {"min_action": -1, "max_action": 1}, (3,)),
    "RescaleObservation": ("Pendulum-v1", {"min_obs": 0, "max_obs": 1}, (3,)),
    "ReshapeObservation": ("images", {"shape": [4, 2, 24]}, (4, 2, 24)),
    "ResizeObservation": ("images", {"shape": [4, 6]}, (4, 6, 3)),
    "StaggerEpisodes": ("CartPole-v1", {}, (4,)),
    "StickyAction": ("CartPole-v1", {"repeat_action_probability": 0.5}, (4,)),
    "TimeAwareObservation": ("CartPole-v1", {"normalize_time": True}, (5,)),
    "TimeLimit": ("CartPole-v1", {"max_episode_steps": 9}, (4,)),
}


@pytest.mark.parametrize("name", sorted(USES))
def test_every_wrapper_can_be_used_by_its_name(name: str) -> None:
    env_name, arguments, shape = USES[name]
    inner = (
        scripted(IMAGES, "uint8", 0, 255)
        if env_name == "images"
        else make_env(env_name, {})
    )
    env = wrapped(inner, name, **arguments)
    assert env.observation_space.shape == shape
    observations = [env.reset(seed=0)[0], env.step(env.action_space.sample())[0]]
    for observation in observations:
        assert observation.shape == shape
        assert observation.dtype == env.observation_space.dtype
    env.close()


def test_parts_of_an_observation_are_selected_by_key_or_index() -> None:
    parts = spaces.Dict(image=spaces.Box(0, 9, (2,)), text=spaces.Text(9))
    inner = TransformObservation(
        scripted([[1, 2], [3, 4]]), lambda seen: {"image": seen, "text": "go"}, parts
    )
    env = wrapped(inner, "FilterObservation", filter_keys=["image"])
    assert env.observation_space == spaces.Dict(image=parts["image"])
    assert [list(seen) for seen in episode_observations(env)] == [["image"]] * 2
    with pytest.raises(EnvStartError, match=r"(?s)\(FilterObservation\).*'sound'"):
        wrapped(inner, "FilterObservation", filter_keys=["sound"])
    places = TransformObservation(
        scripted([[1], [2]]),
        lambda seen: (0, seen),
        spaces.Tuple((parts, parts["image"])),
    )
    env = wrapped(places, "FilterObservation", filter_keys=[1])
    assert env.observation_space == spaces.Tuple([parts["image"]])


def test_every_wrapper_is_tested() -> None:
    tested = {*USES, "FilterObservation", "AtariPreprocessing"}
    assert tested == set(WRAPPERS)
