"""Envs for tests: ledgers, every supported space, and every kind of failure.

Import this module where the envs are built (`import_modules=[MODULE]`, or `envserve
start --import tests.oracle.probe_envs`). Importing it registers the envs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.oracle.env_failures import FAILURES
from tests.oracle.journal import Array
from tests.oracle.ledger_env import LedgerEnv
from tests.oracle.random_envs import RANDOM_ENV as RANDOM_ENV
from tests.oracle.vector_envs import MODES

#: The module whose import registers the envs.
MODULE: Final = __name__

#: Names of envs that also have a vector env, by autoreset mode.
VECTOR_ENVS: Final = MODES

#: Spaces of every kind that can be transmitted.
SPACES: Final[dict[str, spaces.Space[Any]]] = {
    **{
        f"box_{dtype.__name__}": spaces.Box(0, 9, (2, 3), dtype)
        for dtype in (
            *(np.int8, np.int16, np.int32, np.int64),
            *(np.uint8, np.uint16, np.uint32, np.uint64),
            *(np.float16, np.float32, np.float64),
        )
    },
    "image": spaces.Box(0, 255, (84, 84, 4), np.uint8),
    "scalar_box": spaces.Box(-1.0, 1.0, (), np.float32),
    "uneven_box": spaces.Box(
        np.array([-1.0, -np.inf, 0.0]), np.array([1.0, np.inf, 5.0]), dtype=np.float64
    ),
    "unbounded_integers": spaces.Box(-np.inf, np.inf, (3,), np.int32),
    "discrete": spaces.Discrete(5),
    "discrete_start": spaces.Discrete(5, start=-2),
    "multi_binary": spaces.MultiBinary((2, 2)),
    "multi_discrete": spaces.MultiDiscrete([3, 4, 5]),
    "multi_discrete_grid": spaces.MultiDiscrete(np.array([[3, 4], [5, 6]])),
    "dict": spaces.Dict(
        {
            "velocity": spaces.Box(-1.0, 1.0, (3,), np.float32),
            "camera": spaces.Box(0, 255, (4, 4), np.uint8),
            "nested": spaces.Dict({"mode": spaces.Discrete(3)}),
        }
    ),
    "tuple": spaces.Tuple(
        [spaces.Discrete(4), spaces.Tuple([spaces.MultiBinary(3), spaces.Discrete(2)])]
    ),
}


class EchoEnv(gymnasium.Env[Any, Any]):
    """Returns each action as the next observation.

    `space` names the entry of `SPACES` that is the space of both.
    """

    def __init__(self, space: str) -> None:
        self.observation_space = SPACES[space]
        self.action_space = SPACES[space]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} ({type(action)}) is not in the action space")
        return action, 0.0, False, False, {}


class FaultyEnv(gymnasium.Env[Array, np.int64]):
    """Has one fault, which occurs in a step with action 1, or in another method.

    Faults in `step`: nan, inf_reward, wrong_shape, wrong_dtype, spoil (all later steps
    of all envs of the process raise), memory, and `FAILURES`.
    Faults in other methods: raise_in_init, exit_in_init, raise_in_reset, hang_in_close.
    """

    is_process_spoiled = False

    def __init__(self, fault: str = "raise") -> None:
        self.observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._fault = fault
        self._steps = 0
        if fault == "raise_in_init":
            raise RuntimeError("no simulator licence")
        if fault == "exit_in_init":
            os._exit(7)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self._fault == "raise_in_reset":
            raise RuntimeError("no level to load")
        self._steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        observation = np.full(3, min(self._steps, 10), np.float32)
        reward = 1.0
        if action == 1:
            if self._fault == "nan":
                observation[1] = np.nan
            elif self._fault == "inf_reward":
                reward = float("inf")
            elif self._fault == "wrong_shape":
                observation = np.zeros(2, np.float32)
            elif self._fault == "wrong_dtype":
                observation = observation.astype(np.complex128)
            elif self._fault == "spoil":
                FaultyEnv.is_process_spoiled = True
            elif self._fault == "memory":
                np.zeros(1 << 48)  # raises MemoryError
            elif self._fault in FAILURES:
                FAILURES[self._fault](math.inf)
        if FaultyEnv.is_process_spoiled:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return observation, reward, False, False, {}

    def close(self) -> None:
        if self._fault == "hang_in_close":
            FAILURES["hang"](math.inf)


class ResetEnv(gymnasium.Env[Array, np.int64]):
    """Returns the arguments of `reset` in the info; raises for the option level=13."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 1, (1,), np.int64)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if options is not None and options.get("level") == 13:
            raise ValueError("there is no level 13")
        return np.zeros(1, np.int64), {"seed": seed, "options": options}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        return np.ones(1, np.int64), float(action), False, bool(action), {}


class NeedyResetEnv(ResetEnv):
    """Has a `reset` that requires both arguments."""

    def reset(self, seed: Any, options: Any) -> Any:  # type: ignore[override]
        return super().reset(seed=seed, options=options)


class SeedResetEnv(ResetEnv):
    """Has a `reset` that accepts a seed but no options."""

    def reset(self, seed: Any = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


class BareResetEnv(ResetEnv):
    """Has a `reset` that accepts no arguments."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class NativeMethod:
    """A method without a signature, as those of native code."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    @property
    def __signature__(self) -> Any:
        raise ValueError("no signature found for builtin")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)


class NativeResetEnv(ResetEnv):
    """Has a `reset` of native code."""

    def __init__(self) -> None:
        super().__init__()
        self.reset = NativeMethod(super().reset)  # type: ignore[method-assign]


class GatedEnv(LedgerEnv):
    """A ledger env whose constructor blocks while a file, its gate, exists."""

    def __init__(self, gate: str, **options: Any) -> None:
        while os.path.exists(gate):
            time.sleep(0.005)
        super().__init__(**options)

    def pid(self) -> int:
        """Return the process id of the worker."""
        return os.getpid()


class ChaosLedgerEnv(LedgerEnv):
    """A ledger env with slow resets, whose constructor raises while a file exists."""

    def __init__(
        self,
        *,
        max_reset_seconds: float = 0.0,
        failure_flag: str | None = None,
        **options: Any,
    ) -> None:
        """Create the env.

        Args:
          max_reset_seconds: Maximum of the random duration of a reset.
          failure_flag: A file; while it exists, the constructor raises and appends the
          time to it.
          options: Arguments of `LedgerEnv`.

        Raises:
          RuntimeError: The file `failure_flag` exists.
        """
        super().__init__(**options)
        self._max_reset_seconds = max_reset_seconds
        if failure_flag is not None and os.path.exists(failure_flag):
            with open(failure_flag, "a") as file:
                file.write(f"{time.monotonic()}\n")
            raise RuntimeError("the simulator's licence has expired")

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=options)
        if self._max_reset_seconds:
            time.sleep(self.np_random.uniform(0.0, self._max_reset_seconds))
        return result


GATED: Final = "envserve/Gated-v0"
_CLASSES: Final = (
    *(LedgerEnv, GatedEnv, ChaosLedgerEnv, EchoEnv, FaultyEnv),
    *(ResetEnv, NeedyResetEnv, SeedResetEnv, BareResetEnv, NativeResetEnv),
)
for _class in _CLASSES:
    _name = _class.__name__.removesuffix("Env")
    gymnasium.register(f"envserve/{_name}-v0", f"{_class.__module__}:{_class.__name__}")
