"""Envs that a policy learns in seconds: one per kind of space, and one for recurrence.

Episodes have `LENGTH` steps unless stated otherwise; rewards are at most 1 per step.
Importing this module registers them, `ChoicesTask` as `learning-tests/Choices-v0`.
"""

import random
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 8


class _Task(gymnasium.Env[Any, Any]):
    """Env with a random observation at every step, independent of the actions."""

    length = LENGTH
    action_space: Any

    def __init__(self) -> None:
        self._count = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._count = 0
        return self._ask(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), (
            f"{action!r} is not in {self.action_space}"
        )
        reward = self._judge(action)
        self._count += 1
        return self._ask(), reward, self._count == self.length, False, {}

    def _ask(self) -> Any:
        raise NotImplementedError

    def _judge(self, action: Any) -> float:
        raise NotImplementedError


class ChoicesTask(_Task):
    """Rewards the fraction of observed choices that the action repeats."""

    def __init__(self) -> None:
        super().__init__()
        sizes, start = np.array([[2, 3], [4, 2]]), np.array([[0, -1], [5, 0]])
        self.observation_space = spaces.MultiDiscrete(sizes, start=start)
        self.action_space = spaces.MultiDiscrete(sizes, np.int32, start=start)

    def _ask(self) -> Any:
        space = self.observation_space
        assert isinstance(space, spaces.MultiDiscrete)
        self._asked = self.np_random.integers(space.start, space.start + space.nvec)
        return self._asked

    def _judge(self, action: Any) -> float:
        return float((action == self._asked).mean())


class BitsTask(_Task):
    """Rewards the fraction of observed bits that the action inverts."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.MultiBinary((2, 3))
        self.action_space = spaces.MultiBinary((2, 3))

    def _ask(self) -> Any:
        self._asked = self.np_random.integers(0, 2, (2, 3), np.int8)
        return self._asked

    def _judge(self, action: Any) -> float:
        return float((action != self._asked).mean())


class MaskedTask(_Task):
    """Rewards the correct one of two allowed actions with 1; other actions raise.

    The observation contains the two allowed actions, and whether the first or the
    second of them is correct.
    """

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(6, start=1)
        self.observation_space = spaces.Dict(
            observation=spaces.Dict(
                asked=spaces.Discrete(2), where=spaces.Box(0.0, 5.0, (2,))
            ),
            action_mask=spaces.Box(0, 1, (6,), np.int8),
        )

    def _ask(self) -> Any:
        allowed = np.sort(self.np_random.choice(6, 2, replace=False))
        asked = int(self.np_random.integers(2))
        self._wanted = allowed[asked] + 1
        self._mask = np.isin(np.arange(6), allowed).astype(np.int8)
        if self._count == self.length:  # a final observation may allow no action
            self._mask[:] = 0
        return {
            "observation": {"asked": asked, "where": allowed.astype(np.float32)},
            "action_mask": self._mask,
        }

    def _judge(self, action: Any) -> float:
        if not self._mask[action - 1]:
            raise RuntimeError(f"action {action} is not allowed by {self._mask}")
        return float(action == self._wanted)


class MaskedChoicesTask(_Task):
    """Rewards the fraction of choices that match the observation; masked ones raise.

    The mask is an array with the flags of both choices, or, if `split`, a tuple of one
    array per choice.
    """

    def __init__(self, split: bool = False) -> None:
        super().__init__()
        self.action_space = spaces.MultiDiscrete([3, 5])
        flags = [spaces.MultiBinary(3), spaces.MultiBinary(5)]
        self.observation_space = spaces.Dict(
            asked=spaces.MultiDiscrete([3, 5]),
            action_mask=spaces.Tuple(flags) if split else spaces.MultiBinary(8),
        )
        self._split = split

    def _ask(self) -> Any:
        self._asked = self.np_random.integers(0, [3, 5])
        self._masks = [self.np_random.integers(0, 2, n, np.int8) for n in (3, 5)]
        for flags, asked in zip(self._masks, self._asked, strict=True):
            flags[asked] = 1
        joined = np.concatenate(self._masks)
        mask: Any = tuple(self._masks) if self._split else joined
        return {"asked": self._asked, "action_mask": mask}

    def _judge(self, action: Any) -> float:
        for mask, chosen in zip(self._masks, action, strict=True):
            if not mask[chosen]:
                raise RuntimeError(f"action {action} is not allowed by {self._masks}")
        return float((action == self._asked).mean())


class ImageTask(_Task):
    """Rewards choosing the bright side of a noisy image: up, down, left or right."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(4)
        self.observation_space = spaces.Box(0, 255, (2, 16, 16), np.uint8)

    def _ask(self) -> Any:
        self._side = int(self.np_random.integers(4))
        image = self.np_random.integers(0, 128, (2, 16, 16), np.uint8)
        across, along = self.np_random.integers([0, 4], [4, 10])
        lit = image[:, across : across + 3, along : along + 3]
        lit += 127
        rotated = {0: image, 1: image[:, ::-1], 2: image.swapaxes(1, 2)}
        return rotated.get(self._side, image.swapaxes(1, 2)[:, :, ::-1])

    def _judge(self, action: Any) -> float:
        return float(action == self._side)


class XorTask(_Task):
    """Rewards the xor of the signs of two numbers, which are observed with an image.

    The image has no influence. No policy that is linear in the numbers is better than
    chance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Dict(
            image=spaces.Box(0, 255, (8, 8), np.uint8),
            numbers=spaces.Box(-1.0, 1.0, (2,)),
        )

    def _ask(self) -> Any:
        self._bits = self.np_random.integers(0, 2, 2)
        image = self.np_random.integers(0, 256, (8, 8), np.uint8)
        return {"image": image, "numbers": (2 * self._bits - 1).astype(np.float32)}

    def _judge(self, action: Any) -> float:
        return float(action == self._bits[0] ^ self._bits[1])


class RecallTask(_Task):
    """Rewards the answer in the last of 5 steps if it equals the cue in the first step.

    The observation contains the cue (-1 or 1 in the first step, 0 afterwards) and a
    flag for the last step. A policy without recurrence can only guess.

    With discrete actions, the correct answer (1 for cue 1, 0 for cue -1) earns 1, so
    guessing earns 0.5. Otherwise, the answer earns 1 minus its squared distance from
    the cue, so the best guess, 0, earns 0.
    """

    length = 5

    def __init__(self, is_discrete: bool = True) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
        if is_discrete:
            self.action_space = spaces.Discrete(2)

    def _ask(self) -> Any:
        if self._count == 0:
            self._cue = float(self.np_random.choice([-1.0, 1.0]))
            return np.array([self._cue, 0.0], np.float32)
        return np.array([0.0, self._count == self.length - 1], np.float32)

    def _judge(self, action: Any) -> float:
        if self._count < self.length - 1:
            return 0.0
        if isinstance(self.action_space, spaces.Discrete):
            return float(action == (self._cue > 0))
        return 1.0 - (float(action[0]) - self._cue) ** 2


class StallingCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole in which 1 of 500 steps takes 20 ms longer."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if random.random() < 0.002:
            time.sleep(0.02)
        return self.env.step(action)


gymnasium.register("learning-tests/StallingCartPole-v0", f"{__name__}:StallingCartPole")
for _task in _Task.__subclasses__():
    _name = _task.__name__.removesuffix("Task")
    gymnasium.register(f"learning-tests/{_name}-v0", f"{__name__}:{_task.__name__}")
