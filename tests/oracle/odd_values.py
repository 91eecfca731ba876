"""A table of regular and unusual return values of user envs, with the expected outcome.

Import this module where the envs are built, like `probe_envs`. Each action selects a
case, so each row of a batch can test a different case.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import types
from typing import Any, Final, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

MODULE: Final = __name__
NAME: Final = "envserve/OddValues-v0"

F4, F8, U1 = np.float32, np.float64, np.uint8
NAN, INF = np.nan, np.inf

#: The leaves of an observation: for each leaf its space, and the value that it has in
#: cases that test other leaves.
LEAVES: Final[dict[str, tuple[spaces.Space[Any], Any]]] = {
    "f": (spaces.Box(-INF, INF, (2,), F4), np.zeros(2, F4)),
    "u": (spaces.Box(0, 255, (2,), U1), np.zeros(2, U1)),
    "s": (spaces.Box(-INF, INF, (), F4), np.zeros((), F4)),
    "d": (spaces.Discrete(5), 0),
    "m": (spaces.MultiBinary(2), np.zeros(2, np.int8)),
    "n": (spaces.MultiDiscrete([3, 400]), np.zeros(2, np.int64)),
    "h": (spaces.Box(-INF, INF, (1,), np.float16), np.zeros(1, np.float16)),
    "t": (spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)]), (0, 0)),
}


class Case(NamedTuple):
    """A value returned by an env, and the expected outcome.

    Attributes:
      part: The name of a leaf, or observation, reward, terminated, truncated, info or
      step.
      value: The value that the env returns for this part.
      expected: The value that the client receives, `...` if it is the same value, or a
      part of the error message.
    """

    part: str
    value: Any
    expected: Any


class NoTruthValue(collections.UserDict[str, Any]):
    """A mapping without a truth value, like a TensorDict."""

    def __bool__(self) -> bool:
        raise ValueError("a mapping is neither true nor false")


class Color(enum.Enum):
    RED = 1


class Lazy:
    """An object with `__array__`, like lazy frames."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.ones(2, F4)


def ones(dtype: Any) -> Any:
    return np.ones(2, dtype)


OBSERVATIONS: Final = {
    "float32": Case("f", ones(F4), [1, 1]),
    "float64": Case("f", ones(F8), [1, 1]),
    "float16 for float32": Case("f", ones(np.float16), [1, 1]),
    "int64 for float32": Case("f", ones(np.int64), [1, 1]),
    "bool for float32": Case("f", ones(bool), [1, 1]),
    "list": Case("f", [0.5, 1], [0.5, 1]),
    "tuple": Case("f", (0.5, 1), [0.5, 1]),
    "lazy array": Case("f", Lazy(), [1, 1]),
    "other byte order": Case("f", ones(">f4"), [1, 1]),
    "Fortran order, strides": Case("f", np.ones((4, 4), F4, "F")[::2, 1], [1, 1]),
    "read-only": Case("f", np.broadcast_to(F4(1), 2), [1, 1]),
    "masked": Case("f", np.ma.array(ones(F4)), [1, 1]),
    "complex": Case("f", ones(complex), "got complex128[2]; fix"),
    "text": Case("f", "north", "float32[2]; got a str"),
    "None": Case("f", None, "expected observation 'f' float32[2]; got None"),
    "objects": Case("f", np.array([{}, 1]), "float32[2]; got object[2]"),
    "ragged list": Case("f", [[1], [2, 3]], "float32[2]; got a list"),
    "shape": Case("f", np.ones(3, F4), "float32[2]; got float32[3]"),
    "row": Case("f", np.ones((1, 2), F4), "float32[2]; got float32[1, 2]"),
    "scalar for array": Case("f", 1.0, "float32[2]; got float64[]"),
    "empty": Case("f", np.ones(0, F4), "float32[2]; got float32[0]"),
    "nan": Case("f", np.array([0, NAN], F4), "'f' to be finite; got nan"),
    "inf in float64": Case("f", np.array([0, INF]), "'f' to be finite; got inf"),
    "too large for float32": Case("f", np.array([0, 1e300]), "be finite; got inf"),
    "uint8": Case("u", ones(U1), [1, 1]),
    "int64 for uint8": Case("u", np.array([0, 255]), [0, 255]),
    "bool for uint8": Case("u", ones(bool), [1, 1]),
    "list for uint8": Case("u", [0, 255], [0, 255]),
    "too large for uint8": Case("u", np.array([0, 300]), "from 0 to 255; got 300"),
    "negative for uint8": Case("u", np.array([0, -1]), "from 0 to 255; got -1"),
    "list too large for uint8": Case("u", [0, 300], "from 0 to 255; got 300"),
    "float64 for uint8": Case("u", ones(F8), "expected observation 'u' uint8[2]; got"),
    "list of floats for uint8": Case("u", [0.5, 1], "uint8[2]; got float64[2]; cast"),
    "scalar array": Case("s", np.ones((), F4), 1),
    "number": Case("s", 1, 1),
    "float64 number": Case("s", F8(0.5), 0.5),
    "one-element array for scalar": Case("s", np.ones(1, F4), "float32[]; got float32"),
    "int": Case("d", 3, 3),
    "int32": Case("d", np.int32(3), 3),
    "uint64": Case("d", np.uint64(3), 3),
    "bool for Discrete": Case("d", True, 1),
    "array for Discrete": Case("d", np.array(3), 3),
    "float for Discrete": Case("d", 3.0, "'d' int64[]; got float64[]; cast"),
    "huge uint64": Case("d", np.uint64(2**64 - 1), "got 18446744073709551615"),
    "bool for MultiBinary": Case("m", ones(bool), [1, 1]),
    "int32 for MultiDiscrete": Case("n", np.array([2, 399], np.int32), [2, 399]),
    "float64 for float16": Case("h", np.ones(1), [1]),
    "too large for float16": Case("h", np.array([1e5]), "'h' to be finite; got inf"),
    "list for tuple": Case("t", [1, 2], (1, 2)),
    "array for tuple": Case("t", np.array([1, 2]), "a tuple of 2 values; got ndarray"),
    "short tuple": Case("t", (1,), "expected a tuple of 2 values; got tuple of 1"),
    "no dict": Case(
        "observation", np.zeros(2), "expected a dict with the keys ['f', 'u',"
    ),
    "fewer keys": Case("observation", {"f": ones(F4)}, "got ['f']"),
    "ordered dict": Case("observation", collections.OrderedDict, [0, 0]),
    "mapping": Case("observation", types.MappingProxyType, [0, 0]),
}
REWARDS: Final = {
    "float": Case("reward", 0.5, 0.5),
    "int": Case("reward", 2, 2),
    "bool": Case("reward", True, 1),
    "float32": Case("reward", F4(0.5), 0.5),
    "int64": Case("reward", np.int64(2), 2),
    "scalar array": Case("reward", np.array(0.5), 0.5),
    "one-element list": Case("reward", [1], 1),
    "one-element array": Case("reward", np.array([0.5]), 0.5),
    "Fraction": Case("reward", fractions.Fraction(1, 2), 0.5),
    "None": Case("reward", None, "expected the reward to be a number; got None"),
    "two": Case("reward", [1, 2], "reward to be a number; got a list of 2"),
    "array": Case("reward", np.ones(3), "a number; got float64[3]"),
    "dict": Case("reward", {"a": 1}, "reward to be a number; got a dict of 1"),
    "complex": Case("reward", 1j, "reward to be a number; got a complex"),
    "text": Case("reward", "good", "reward to be a number; got a str"),
    "huge int": Case("reward", 10**400, "a number; got one that exceeds float64"),
    "nan": Case("reward", NAN, "expected a finite reward; got nan"),
    "inf": Case("reward", F4(INF), "expected a finite reward; got inf"),
}
FLAGS: Final = {
    "numpy's": Case("terminated", np.True_, True),
    "int": Case("terminated", 1, True),
    "None": Case("truncated", None, False),
    "one-element array": Case("truncated", np.array([True]), True),
    "array": Case("terminated", ones(bool), "expected terminated and truncated to be"),
    "by agent": Case("terminated", {"a": False}, "terminated to be a bool; got a dict"),
    "object": Case("truncated", object(), "truncated to be a bool; got an object"),
    "text": Case("truncated", "no", "expected truncated to be a bool; got a str"),
}
STEPS: Final = {
    "four": Case("step", (0, 0.0, False, {}), "truncated and info; got 4 values"),
    "six": Case("step", (0, 0.0, False, False, {}, {}), "values; fix the env"),
    "nothing": Case("step", None, "and info; got a NoneType; fix the env"),
    "no info": Case("info", None, "expected info to be a dict; got NoneType"),
    "infos": Case("info", [{}], "expected info to be a dict; got list"),
}
INFOS: Final = {
    "none": Case("info", {}, {}),
    "scalars": Case("info", {"a": 1, "b": 0.5, "c": True, "d": None, "e": "x"}, ...),
    "numpy's": Case("info", {"a": np.int64(1), "b": F4(0.5), "c": np.True_}, ...),
    "array": Case("info", {"a": ones(F4)}, ...),
    "image": Case("info", {"a": np.zeros((64, 64, 3), U1), "k": 1}, ...),
    "scalar arrays": Case("info", {f"{i}": np.array(True) for i in range(40)}, ...),
    "empty array": Case("info", {"a": np.zeros((0, 3))}, ...),
    "other byte order": Case("info", {"a": ones(">f8")}, {"a": ones(F8)}),
    "lists": Case("info", {"a": [1, [2, "x"]]}, ...),
    "tuple": Case("info", {"a": (1, 2)}, {"a": [1, 2]}),
    "nested": Case("info", {"a": {"b": {"c": ones(F4)}}}, ...),
    "bytes": Case("info", {"a": b"\x00\xff"}, ...),
    "text": Case("info", {"ä": "\N{PILE OF POO}"}, ...),
    "nan": Case("info", {"a": NAN, "b": INF}, ...),
    "numbers as keys": Case("info", {1: 2, 0.5: 3}, ...),
    "ordered dict": Case("info", collections.OrderedDict(a=1), {"a": 1}),
    "mapping": Case("info", types.MappingProxyType({"a": 1}), {"a": 1}),
    "no truth value": Case("info", NoTruthValue(a=1), {"a": 1}),
    "many numbers": Case("info", {"a": list(range(10_000)), "k": 1}, ...),
    "huge int": Case("info", {"a": 2**70, "k": 1}, ...),
    "object": Case("info", {"a": object(), "k": 1}, {"k": 1, "omitted": ["a"]}),
    "set": Case("info", {"a": {1}, "k": 1}, {"k": 1, "omitted": ["a"]}),
    "enum": Case("info", {"a": Color.RED, "k": 1}, {"a": 1, "k": 1}),
    "complex": Case("info", {"a": 1j, "k": 1}, {"k": 1, "omitted": ["a"]}),
    "function": Case("info", {"a": len, "k": 1}, {"k": 1, "omitted": ["a"]}),
    "date": Case("info", {"a": datetime.date.min}, {"omitted": ["a"]}),
    "decimal": Case("info", {"a": decimal.Decimal(1)}, {"omitted": ["a"]}),
    "objects": Case("info", {"a": np.array([{}]), "k": 1}, {"k": 1, "omitted": ["a"]}),
    "tuple as key": Case("info", {(1, 2): 3, "k": 1}, {"k": 1, "omitted": ["tuple"]}),
    "surrogate": Case("info", {"a": "\udcff", "k": 1}, {"k": 1, "omitted": ["a"]}),
    "too long": Case("info", {"a": bytes(70_000), "k": 1}, {"k": 1, "omitted": ["a"]}),
    "too many numbers": Case("info", {"a": [0] * 20_000}, {"omitted": ["a"]}),
}

TABLES: Final = (OBSERVATIONS, REWARDS, FLAGS, STEPS, INFOS)
CASES: Final = [case for table in TABLES for case in table.values()]


class OddValuesEnv(gymnasium.Env[Any, np.int64]):
    """Returns the value of the case that its action selects.

    With `part`, the observation consists of that leaf only.
    """

    def __init__(self, part: str = "", has_info: bool = True) -> None:
        self.part = part
        self.has_info = has_info
        if part:
            self.observation_space = LEAVES[part][0]
        else:
            children = [(name, space) for name, (space, _) in LEAVES.items()]
            self.observation_space = spaces.Dict(children)
        self.action_space = spaces.Discrete(len(CASES))

    def observe(self, case: Case | None = None) -> Any:
        observation = {name: value for name, (_, value) in LEAVES.items()}
        if case is not None and case.part in observation:
            observation[case.part] = case.value
        if case is not None and case.part == "observation":
            return case.value(observation) if callable(case.value) else case.value
        return observation[self.part] if self.part else observation

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return (self.observe(), NoTruthValue()) if self.has_info else self.observe()

    def step(self, action: np.int64) -> Any:
        case = CASES[action]
        if case.part == "step":
            return case.value
        parts = {"reward": 0.0, "terminated": False, "truncated": False, "info": {}}
        if case.part in parts:
            parts[case.part] = case.value
        return self.observe(case), *parts.values()


gymnasium.register(NAME, f"{__name__}:OddValuesEnv")
