"""One env in another process or on a server, as a `gymnasium.Env`."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector.utils import batch_space, iterate

from envserve.client.batch_env import BatchEnv
from envserve.client.vector_env import metadata_of
from envserve.errors import ActionError, SpaceError
from envserve.spaces.leaves import flatten, unflatten


class Env(gymnasium.Env[Any, Any]):
    """The only row of a `BatchEnv`, without the batch dimension.

    If an episode is lost, its last step is truncated, `info["fault"]` contains the
    reason, and `info["valid"]` is False. Call `reset` as after any other episode.
    """

    def __init__(self, batch: BatchEnv) -> None:
        """Wrap a batch of one row with autoreset "disabled"; take ownership of it."""
        self._batch = batch
        batch.reset_call = "reset()"
        self.observation_space = batch.observation_space
        self.action_space = batch.action_space
        self._batched_space = batch_space(batch.observation_space, 1)
        (self.render_mode,) = batch.get_attr("render_mode")
        self.metadata = metadata_of(batch)
        # In "human" mode the worker would open the window. Without this mode, Gymnasium
        # applies the wrapper HumanRendering, which opens it in this process.
        modes = self.metadata.get("render_modes", [])
        self.metadata["render_modes"] = [mode for mode in modes if mode != "human"]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode; see `gymnasium.Env.reset`."""
        seeds = None if seed is None else [seed]
        observation = self._batch.reset(None, seeds, options=options)
        super().reset(seed=seed)
        return self._only(observation), dict(self._batch.reset_infos.get(0, {}))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the env; see `gymnasium.Env.step`.

        Raises:
          ActionError: The action does not fit the action space.
          LocalProtocolError: The episode has ended; call `reset`.
          ResetFirst: The env has not been reset yet.
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
        """Render the env according to its `render_mode`."""
        return self._batch.render(0)

    def close(self) -> None:
        """Close the env and end its worker; idempotent."""
        self._batch.close()

    def _only(self, observation: Any) -> Any:
        return next(iter(iterate(self._batched_space, observation)))
