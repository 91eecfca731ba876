"""One env in another process, here or on a server, as a `gymnasium.Env`."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector.utils import batch_space, iterate

from envserve.client.batch_env import BatchEnv
from envserve.client.vector_env import metadata_of
from envserve.errors import ActionError, SpaceError
from envserve.spaces.leaves import flatten, unflatten


class Env(gymnasium.Env[Any, Any]):
    """The only row of a `BatchEnv`, without the dimension of rows.

    An episode that was lost is truncated, `info["fault"]` says why, and `info["valid"]`
    is False; `reset` begins the next.
    """

    def __init__(self, batch: BatchEnv) -> None:
        """Takes over a batch of one row that does not reset by itself."""
        self._batch = batch
        batch.reset_call = "reset()"
        self.observation_space = batch.observation_space
        self.action_space = batch.action_space
        self._batched_space = batch_space(batch.observation_space, 1)
        (self.render_mode,) = batch.get_attr("render_mode")
        self.metadata = metadata_of(batch)
        # A window would belong to the worker; the wrapper HumanRendering shows one.
        modes = self.metadata.get("render_modes", [])
        self.metadata["render_modes"] = [mode for mode in modes if mode != "human"]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode; see `gymnasium.Env.reset`."""
        seeds = None if seed is None else [seed]
        observation = self._batch.reset(None, seeds, options=options)
        super().reset(seed=seed)
        return self._only(observation), dict(self._batch.reset_infos.get(0, {}))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps the env; see `gymnasium.Env.step`.

        Raises:
          ActionError: The action does not fit the action space.
          LocalProtocolError: The episode has ended; `reset` begins the next.
          ResetFirst: There was no reset.
        """
        space = self.action_space
        try:
            rows = [[leaf] for leaf in flatten(space, action)]
        except SpaceError as error:
            raise ActionError(f"action: {error}") from None
        result = self._batch.step(unflatten(space, rows))
        info = dict(result.infos.get(0, {}))
        if not result.valid[0]:
            info["valid"] = False
        flags = bool(result.terminated[0]), bool(result.truncated[0])
        return self._only(result.observation), float(result.reward[0]), *flags, info

    def render(self) -> Any:
        """Returns what the env renders."""
        return self._batch.render(0)

    def close(self) -> None:
        """Ends the env and its worker; may be called twice."""
        self._batch.close()

    def _only(self, observation: Any) -> Any:
        return next(iter(iterate(self._batched_space, observation)))
