"""An env with random observations and infos, of one of eight kinds.

The argument `kind` of `envserve/Random-v0` selects the kind. The values, and the keys
of the infos, depend only on the env's random generator and on the actions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["KINDS", "RANDOM_ENV"]

RANDOM_ENV: Final = "envserve/Random-v0"
Generator = np.random.Generator

_SCALARS: Final = (np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8)


def _numbers(draw: Generator, t: int) -> dict[str, Any]:
    return {"float": draw.normal(), "int": t, "bool": t > 3, "float64": draw.random()}


def _numpy_scalars(draw: Generator, t: int) -> dict[str, Any]:
    values = {kind.__name__: kind(draw.integers(100)) for kind in _SCALARS}
    return {**values, "bool": np.bool_(draw.random() < 0.5), "text": np.str_(t)}


def _arrays(draw: Generator, t: int) -> dict[str, Any]:
    return {
        "mask": draw.integers(0, 2, 6).astype(np.int8),
        "image": draw.integers(0, 255, (2, 3), np.uint8),
        "scalar": np.array(draw.normal()),
        "flags": draw.random(3) < 0.5,
        "empty": np.zeros((0, 2), np.float32),
        "t": t,
    }


def _texts(draw: Generator, t: int) -> dict[str, Any]:
    words = ["a", "word", "é\U0001f600"]
    return {
        "text": words[t % 3],
        "texts": np.array(words)[draw.permutation(3)],
        "bytes": np.array([b"x", b"yz"]),
        "t": np.int16(t),
    }


def _containers(draw: Generator, t: int) -> dict[str, Any]:
    return {
        "tuple": (t, np.float32(draw.normal()), ("inner", [draw.random()])),
        "list": [t, None, (1, 2)],
        "none": None,
        "t": float(t),
    }


def _nested(draw: Generator, t: int) -> dict[str, Any]:
    inner = {"x": np.float32(draw.normal()), "pair": (1, t)}
    return {"at": {"t": t, **inner}, "deep": {"er": {"and": {"er": draw.random()}}}}


def _sparse(draw: Generator, t: int) -> dict[str, Any]:
    infos = {**_numbers(draw, t), **_numpy_scalars(draw, t), **_arrays(draw, t)}
    return {key: infos[key] for key in infos if draw.random() < 0.5}


def _mixed(draw: Generator, t: int) -> dict[str, Any]:
    numbers = [int(draw.integers(2**60)), draw.normal(), True, np.float32(t)]
    shuffled = [numbers[at] for at in draw.permutation(4)]
    infos: dict[str, Any] = {"number": shuffled[0], "x": draw.normal()}
    if draw.random() < 0.2:
        infos["often"] = "missing"
    return infos if draw.random() < 0.9 else {}


_BOX: Final = spaces.Box(-9, 9, (3,), np.float32)
#: For each kind, the function that draws infos, and the observation space.
KINDS: Final[
    dict[str, tuple[Callable[[Generator, int], dict[str, Any]], spaces.Space[Any]]]
] = {
    "numbers": (_numbers, _BOX),
    "numpy_scalars": (_numpy_scalars, spaces.Discrete(5)),
    "arrays": (_arrays, spaces.Box(0, 255, (4, 5), np.uint8)),
    "texts": (_texts, spaces.MultiDiscrete([3, 4])),
    "containers": (_containers, spaces.Dict({"a": _BOX, "b": spaces.Discrete(3)})),
    "nested": (_nested, spaces.Tuple([_BOX, spaces.MultiBinary(2), spaces.Dict()])),
    "sparse": (_sparse, _BOX),
    "mixed": (_mixed, spaces.Box(-1, 1, (), np.float64)),
}


class RandomEnv(gymnasium.Env[Any, Any]):
    """An env with random observations, rewards, infos and ends of episodes."""

    def __init__(self, kind: str, render_mode: str | None = None) -> None:
        self._draw_infos, space = KINDS[kind]
        self.observation_space = copy.deepcopy(space)  # with its own generator
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self._t = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._t = 0
        return self.observation_space.sample(), self._infos()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        reward = float(action.sum() * self.np_random.normal())
        ends = self.np_random.random(2) < (0.1, 0.05)
        observation = self.observation_space.sample()
        return observation, reward, bool(ends[0]), bool(ends[1]), self._infos()

    def _infos(self) -> dict[str, Any]:
        return self._draw_infos(self.np_random, self._t)


# Gymnasium's checker rejects empty spaces.
gymnasium.register(
    RANDOM_ENV, entry_point=f"{__name__}:RandomEnv", disable_env_checker=True
)
