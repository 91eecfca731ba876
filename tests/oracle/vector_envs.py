"""An env that is also available as a vector env, in each of Gymnasium's autoreset
modes.

`envserve/Walk{Next,Same,Off}-v0` are the same walk: their `entry_point` makes a single
env, and their `vector_entry_point` makes a `SyncVectorEnv`. Both must produce the same
data. Action 3 in row 0 of the vector env triggers the fault that its argument names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.oracle.env_failures import FAILURES

__all__ = ["MODES", "WalksEnv"]

#: Env names by autoreset mode.
MODES: Final = {
    "next_step": "envserve/WalkNext-v0",
    "same_step": "envserve/WalkSame-v0",
    "disabled": "envserve/WalkOff-v0",
}

#: Functions that corrupt the observations of a vector env, by fault.
_BREAKS: Final[dict[str, Callable[[Any], Any]]] = {
    "nan": lambda observation: {**observation, "x": observation["x"] * math.nan},
    "wrong_shape": lambda observation: {**observation, "x": observation["x"][:1]},
    "wrong_keys": lambda observation: {"x": observation["x"]},
}


class WalkEnv(gymnasium.Env[Any, np.int64]):
    """A random walk that terminates randomly, and is truncated after 7 steps."""

    def __init__(self, mode: str = "", fault: str = "") -> None:
        self.observation_space = spaces.Dict(
            {"x": spaces.Box(-9, 9, (2,), np.float32), "t": spaces.Discrete(8)}
        )
        self.action_space = spaces.Discrete(4)
        self.length = 7

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t, self._x = 0, self.np_random.uniform(-1, 1, 2).astype(np.float32)
        if options:
            self._x[:] = float(options["x"])
        return self._observation(), {"start": float(self._x[0])}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        luck = self.np_random.random()
        self._x[int(action) % 2] += np.float32(luck - 0.5)
        info: dict[str, Any] = {"luck": luck, "at": {"t": self._t}}
        if luck > 0.5:
            info["lucky"] = True
        is_truncated = self._t == self.length
        return self._observation(), float(action), luck > 0.9, is_truncated, info

    def _observation(self) -> dict[str, Any]:
        return {"x": self._x.copy(), "t": np.int64(self._t)}


class WalksEnv(SyncVectorEnv):
    """Several walks; action 3 in row 0 triggers `fault`, if one is specified."""

    def __init__(
        self, num_envs: int, mode: str, fault: str = "", kind: str = ""
    ) -> None:
        super().__init__([WalkEnv] * num_envs, autoreset_mode=AutoresetMode[mode])
        self._kind = kind
        if kind:
            self.metadata = {**self.metadata, "reset_mask": True}
        self.level = 1
        self._fault = fault
        if fault == "uneven":  # the blocks have different shapes
            self.single_observation_space = spaces.Box(0, 1, (num_envs,))

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        if self._kind == "masked_without_seeds" and seed is not None and options:
            raise ValueError("expected no options with seeds")  # as EnvPool's envs
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        if actions[0] == 3 and self._fault in FAILURES:
            FAILURES[self._fault](math.inf)
        others: list[Any]
        observation, *others = super().step(actions)
        if actions[0] == 3 and self._fault in _BREAKS:
            observation = _BREAKS[self._fault](observation)
        if actions[0] == 3 and self._fault == "no_reward":
            others[0] = [None, *others[0][1:]]
        if actions[0] == 3 and self._fault == "list_of_infos":
            others[3] = [{}] * self.num_envs
        if actions[0] == 3 and self._fault == "no_infos":
            others[3] = None
        if self._fault.startswith("final_obs") and "final_obs" in others[3]:
            finals = [*others[3]["final_obs"]]
            none = [None] * self.num_envs
            is_list = self._fault == "final_obs_in_list"
            others[3]["final_obs"] = finals if is_list else np.array(none)
        return observation, *others

    def double(self, number: int) -> int:
        return 2 * number


for _mode, _name in MODES.items():
    gymnasium.register(
        _name,
        entry_point=f"{__name__}:WalkEnv",
        vector_entry_point=f"{__name__}:WalksEnv",
        kwargs={"mode": _mode.upper()},
    )
