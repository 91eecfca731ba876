"""Spaces like those of users, for tests with every kind of space."""

from __future__ import annotations

import string
import warnings
from copy import deepcopy
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Text,
    Tuple,
)

Space = gymnasium.Space[Any]

inf: Final = np.inf


class UserBox(Box):
    """A user's Box subclass with an additional attribute."""

    unit = "m"


class OldBox:
    """A space of the old package gym."""

    __module__ = "gym.spaces.box"
    __qualname__ = "Box"


class UserDiscrete(Discrete):
    """A user's Discrete subclass that contains fewer values than its base class."""

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return super().sample() // 2 * 2

    def contains(self, x: Any) -> bool:
        return bool(super().contains(x) and x % 2 == 0)


class UserText(Text):
    """A user's subclass of Text."""


class Missions(gymnasium.Space[str]):
    """A space of texts that does not derive from Gymnasium's Text, like MiniGrid's."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        color = ("red", "green")[int(self.np_random.integers(2))]
        return f"get the {color} ball, then open the door"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and x.startswith("get the ")


class Points(gymnasium.Space[Any]):
    """A space of arrays that does not derive from a Gymnasium space."""

    def __init__(self) -> None:
        super().__init__((2,), np.float32)

    def __repr__(self) -> str:
        return "Points()"


def nested(levels: int) -> Space:
    space: Space = Discrete(2)
    for level in range(levels):
        space = Dict({"k": space}) if level % 2 else Tuple([space])
    return space


def with_max_bytes(space: Space, max_bytes: int) -> Space:
    """Set a space's `max_bytes`, the maximum size of a value, and return the space."""
    space.max_bytes = max_bytes  # type: ignore[attr-defined]
    return space


#: Spaces of arrays, for observations and, unless they are unbounded, for actions.
ARRAYS: Final[dict[str, Space]] = {
    "float16": Box(-1.0, 1.0, (3,), np.float16),
    "float32": Box(-1.0, 1.0, (3,), np.float32),
    "float64": Box(-1.0, 1.0, (3,), np.float64),
    "int8": Box(-9, 9, (3,), np.int8),
    "int64": Box(-9, 9, (3,), np.int64),
    "uint8": Box(0, 255, (3,), np.uint8),
    "uint64": Box(0, 2**62, (3,), np.uint64),
    "bool": Box(0, 1, (3,), np.bool_),
    "scalar": Box(-1.0, 1.0, (), np.float32),
    "image": Box(0, 255, (8, 8, 3), np.uint8),
    "unbounded": Box(-inf, inf, (2,), np.float32),
    "half_bounded": Box(np.array([0, -inf]), np.array([inf, 1]), dtype=np.float64),
    "uneven": Box(np.arange(4.0), np.arange(4.0) + 1, dtype=np.float64),
    "no_items": Box(0.0, 1.0, (0, 3), np.float32),
    "many_dimensions": Box(0, 1, (1, 2, 1, 2, 1, 2, 1), np.float32),
    "discrete": Discrete(5),
    "discrete_start": Discrete(5, start=-2),
    "discrete_int8": Discrete(3, start=125, dtype=np.int8),
    "discrete_one": Discrete(1),
    "multi_binary": MultiBinary(7),
    "multi_binary_grid": MultiBinary((2, 3)),
    "multi_discrete": MultiDiscrete([3, 4, 5]),
    "multi_discrete_grid": MultiDiscrete(np.array([[3, 4], [5, 6]])),
    "multi_discrete_start": MultiDiscrete([3, 4], start=[-1, 10]),
    "multi_discrete_uint8": MultiDiscrete([6, 6], dtype=np.uint8, start=[250, 0]),
    "dict": Dict({"b": Discrete(2), "a": Box(0.0, 1.0, (2,), np.float32)}),
    "dict_ordered": Dict([("z", Discrete(2)), ("a", Discrete(3))]),
    "dict_int_keys": Dict({2: Discrete(2), 1: Discrete(3)}),  # type: ignore[dict-item]
    "dict_mixed_keys": Dict([("a", Discrete(2)), (1, Discrete(3))]),  # type: ignore[list-item]
    "dict_slashed_keys": Dict({"a/b": Discrete(2), "": Discrete(3), "ä": Discrete(2)}),
    "dict_empty": Dict({}),
    "dict_with_empty": Dict({"a": Dict({}), "b": Discrete(2)}),
    "dict_of_empty": Dict({"a": Dict({}), "b": Tuple([])}),
    "tuple": Tuple([Discrete(4), Tuple([MultiBinary(3), Discrete(2)])]),
    "tuple_empty": Tuple([]),
    "eight_deep": nested(7),
    "user_box": UserBox(-1.0, 1.0, (3,), np.float32),
    "user_discrete": UserDiscrete(6),
}
ENCODED: Final[dict[str, Space]] = {
    "text": Text(12),
    "text_from_empty": Text(5, min_length=0),
    "text_of_digits": Text(3, min_length=3, charset=string.digits),
    "text_wide": Text(6, charset="äß日🙂"),
    "user_text": UserText(9),
    "missions": Missions(),
    "dict_with_text": Dict(
        {"image": Box(0, 255, (4, 4), np.uint8), "mission": Text(9)}
    ),
    "tuple_with_text": Tuple([Text(3), Discrete(2), Text(4)]),
    "dict_with_missions": Dict({"d": Discrete(4), "mission": Missions()}),
    "sequence": Sequence(Discrete(5)),
    "sequence_stacked": Sequence(Box(0.0, 1.0, (2,), np.float32), stack=True),
    "sequence_of_scalars": Sequence(Box(0.0, 1.0, (), np.float64)),
    "sequence_of_images": with_max_bytes(
        Sequence(Box(0, 255, (8, 8), np.uint8)), 1 << 14
    ),
    "sequence_of_dicts": Sequence(Dict({"a": Discrete(2), "t": Text(4)})),
    "sequence_of_dicts_stacked": Sequence(
        Dict({"a": Discrete(2), "t": Text(4)}), stack=True
    ),
    "sequence_of_tuples": Sequence(Tuple([Discrete(2), MultiBinary(3)])),
    "sequence_of_texts_stacked": Sequence(Text(4), stack=True),
    "sequence_of_sequences": Sequence(Sequence(MultiDiscrete([2, 3]))),
    "sequence_of_graphs": with_max_bytes(Sequence(Graph(Discrete(3), None)), 1 << 14),
    "sequence_of_nothing": Sequence(Dict({"a": Tuple([])})),
    "graph": Graph(Box(-1.0, 1.0, (3,), np.float32), Discrete(4)),
    "graph_without_edges": Graph(Discrete(3), None),
    "graph_of_boxes": Graph(Discrete(3), Box(0.0, 1.0, (2,), np.float32)),
    "graph_of_dicts": Graph(Dict({"a": Discrete(2), "b": MultiBinary(2)}), Discrete(2)),
    "graph_of_texts": Graph(Text(3), Tuple([Discrete(2), Discrete(3)])),
    "one_of": OneOf([Discrete(2), Box(-1.0, 1.0, (3,), np.float32)]),
    "one_of_texts": OneOf([Text(3), Text(8), Dict({"t": Text(2), "n": Discrete(3)})]),
    "one_of_empty": OneOf([Dict({}), Discrete(2)]),
    "one_of_sequences": OneOf([Sequence(Discrete(2)), Graph(Discrete(2), None)]),
    "dict_of_all": Dict(
        {
            "choice": OneOf([Discrete(2), Text(2)]),
            "graph": Graph(Discrete(3), Discrete(2)),
            "image": Box(0, 255, (4, 4), np.uint8),
            "items": Sequence(Discrete(9)),
            "name": Text(7),
        }
    ),
}
#: Unsupported spaces, and a pattern that matches the error.
UNSUPPORTED: Final[dict[str, tuple[Space, str]]] = {
    "user_space": (Points(), r"got Points\(\), a Points; derive its class from one of"),
    "nine_deep": (nested(8), "at most 8 levels deep.*flatten the space"),
    "longdouble": (Box(0, 1, (2,), np.longdouble), "expected one of the dtypes"),
    "tuple_keys": (Dict({(1, 2): Discrete(2)}), "expected str or int keys"),  # type: ignore[dict-item]
    "text_of_nothing": (
        Text(0, min_length=0, charset=""),
        "a Text with a non-empty charset",
    ),
    "odd_max_bytes": (with_max_bytes(Text(4), 1 << 30), "max_bytes of Text"),
    "no_space": (None, r"a gymnasium\.Space; got None of class .*constructor$"),  # type: ignore[dict-item]
    "space_of_gym": (OldBox(), r"of class gym\.spaces\.box\.Box; convert .* Shimmy"),  # type: ignore[dict-item]
    "method_of_pettingzoo": (Discrete(2).sample, "got <bound method .*several agents"),  # type: ignore[dict-item]
    "class": (Box, r"got <class 'gymnasium.spaces.box.Box'> of class"),  # type: ignore[dict-item]
    "user_space_in_sequence": (
        with_max_bytes(Sequence(Points()), 4096),
        "a Points; derive",
    ),
    "user_space_in_dict": (Dict({"a": Tuple([Points()])}), "at 'a/0'"),
}
ALL_SPACES: Final = {**ARRAYS, **ENCODED}


class TableEnv(gymnasium.Env[Any, Any]):
    """Observes a space's samples or the last action; an episode takes three steps."""

    def __init__(self, space: str, echoes_actions: bool = True) -> None:
        table = {
            **ALL_SPACES,
            **{name: each for name, (each, _) in UNSUPPORTED.items()},
        }
        self.observation_space = deepcopy(table[space])
        self.action_space = self.observation_space if echoes_actions else Discrete(2)
        self._echoes_actions = echoes_actions

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        with warnings.catch_warnings():
            # A Box accepts scalars, but Gymnasium warns about them.
            warnings.simplefilter("ignore")
            is_valid = self.action_space.contains(action)
        if not is_valid:
            raise ValueError(f"{action!r} ({type(action)}) is not in the action space")
        observation = (
            action if self._echoes_actions else self.observation_space.sample()
        )
        return observation, 1.0, self._steps == 3, False, {}


gymnasium.register("Table-v0", f"{__name__}:TableEnv")
