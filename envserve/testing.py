"""Envs that probe: a ledger, an echo, and one that fails on demand.

Import this module where the envs are built (`import_modules=["envserve.testing"]`,
or `envserve start --import envserve.testing`): as with every module that offers
envs to Gymnasium, importing it registers them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["SPACES", "EchoEnv", "FaultyEnv", "LedgerEnv", "ledger_hash"]

Array = np.ndarray[Any, Any]

_HASH_MODULUS: Final = 2**61 - 1


def ledger_hash(previous: int, action: int) -> int:
    """Returns the running hash of a ledger after one more action."""
    return (previous * 6364136223846793005 + action + 1442695040888963407) % (
        _HASH_MODULUS
    )


class LedgerEnv(gymnasium.Env[Array, np.int64]):
    """Keeps the books, so that a wrong transition shows.

    Its observation is int64 `[4]`: the seed of this incarnation, the episode within
    it, the step within the episode, and a running hash of all actions since the
    seed. Its reward echoes the action. Episodes last `length` steps and end
    alternately by termination and truncation.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        length: int = 10,
        reset_seconds: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        """Sets how long episodes last, and how long a reset takes."""
        self.observation_space = spaces.Box(-1, 2**62, (4,), np.int64)
        self.action_space = spaces.Discrete(1000)
        self.render_mode = render_mode
        self.difficulty = 1
        self._length = length
        self._reset_seconds = reset_seconds
        self._seed = -1
        self._episode = 0
        self._step = 0
        self._hash = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Starts the next episode, or with a seed a new ledger."""
        super().reset(seed=seed)
        if self._reset_seconds:
            time.sleep(self._reset_seconds)
        if seed is not None:
            self._seed, self._episode, self._hash = seed, 0, 0
        else:
            self._episode += 1
        self._step = 0
        return self._observation(), {"reset_of_episode": self._episode}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Enters an action."""
        self._step += 1
        self._hash = ledger_hash(self._hash, int(action))
        is_over = self._step >= self._length
        is_termination = self._episode % 2 == 0
        return (
            self._observation(),
            float(action),
            is_over and is_termination,
            is_over and not is_termination,
            {"step": self._step, "weights": np.full(2, self._step, np.float32)},
        )

    def render(self) -> Any:
        """Returns an image uint8 `[2, 3, 3]` that shows the step."""
        return np.full((2, 3, 3), self._step, np.uint8)

    def echo(self, *arguments: Any) -> list[Any]:
        """Returns its arguments."""
        return list(arguments)

    def complain(self, text: str) -> None:
        """Raises a ValueError."""
        raise ValueError(text)

    def loaded_modules(self) -> list[str]:
        """Returns the names of the modules that this process has imported."""
        import sys

        return sorted(sys.modules)

    def _observation(self) -> Array:
        return np.array([self._seed, self._episode, self._step, self._hash], np.int64)


#: A space of every kind that can be carried.
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
    """Observes its last action; its two spaces are the same one of `SPACES`."""

    def __init__(self, space: str) -> None:
        """Takes the name of the space."""
        self.observation_space = SPACES[space]
        self.action_space = SPACES[space]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Observes a sample."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Observes the action, if it belongs to the space."""
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} ({type(action)}) is not in the action space")
        return action, 0.0, False, False, {}


class FaultyEnv(gymnasium.Env[Array, np.int64]):
    """Fails in one way, in the step whose action is 1, or in another method.

    Faults of step: raise, nan, inf_reward, wrong_shape, wrong_dtype, exit, segfault,
    kill, hang, spin. Of other methods: raise_in_init, exit_in_init,
    raise_in_reset, hang_in_close.
    """

    def __init__(self, fault: str = "raise") -> None:
        """Takes the name of the fault."""
        self.observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._fault = fault
        self._steps = 0
        if fault == "raise_in_init":
            raise RuntimeError("no simulator licence")
        if fault == "exit_in_init":
            os._exit(7)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Observes zeros."""
        super().reset(seed=seed)
        if self._fault == "raise_in_reset":
            raise RuntimeError("no level to load")
        self._steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: np.int64) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Counts up; with action 1 fails."""
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
                observation = observation.astype(np.float64)
            elif self._fault in _STEP_FAULTS:
                _STEP_FAULTS[self._fault]()
        return observation, reward, False, False, {}

    def close(self) -> None:
        """Hangs if that is the fault."""
        if self._fault == "hang_in_close":
            _hang()


def _raise() -> None:
    raise RuntimeError("the simulator lost its balance")


def _hang() -> None:
    while True:
        time.sleep(3600)


def _spin() -> None:
    """Holds the interpreter's lock in C for good, where no signal handler runs."""
    ctypes.PyDLL(None).pause()


_STEP_FAULTS: Final[dict[str, Callable[[], Any]]] = {
    "raise": _raise,
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": _hang,
    "spin": _spin,
}

for _name, _class in (
    ("Ledger", LedgerEnv),
    ("Echo", EchoEnv),
    ("Faulty", FaultyEnv),
):
    gymnasium.register(
        f"envserve/{_name}-v0", f"{_class.__module__}:{_class.__qualname__}"
    )
