"""One env in another process or on a server, as a `gymnasium.Env`."""

from __future__ import annotations

import copy as copying
from typing import Any, Final

import gymnasium

from envserve.client.batch_env import BatchEnv
from envserve.client.vector_env import attribute_of, metadata_of
from envserve.errors import CallError
from envserve.spaces.leaves import unbatch

#: Attributes that this class has itself; all others are forwarded to the env.
_OWN_ATTRIBUTES: Final = {
    *dir(gymnasium.Env),
    *gymnasium.Env.__annotations__,
    *("_batch", "_observation"),
}


class Env(gymnasium.Env[Any, Any]):
    """The only row of a `BatchEnv`, without the batch dimension.

    If a fault ends an episode, its last step is truncated and returns the previous
    observation again, `info["fault"]` contains the reason, and `info["valid"]` is
    False. Call `reset` as after any other episode.
    """

    def __init__(self, batch: BatchEnv) -> None:
        """Wrap a batch of one row with autoreset "disabled"; take ownership of it."""
        self._batch = batch
        batch.reset_call, batch.is_single, batch.steps_ended = "reset()", True, True
        self.observation_space = batch.observation_space
        self.action_space = batch.action_space
        self.render_mode = attribute_of(batch, "render_mode")
        self.metadata = metadata_of(batch)
        # With render mode "human", the worker would open the window. If the metadata
        # lacks this mode, Gymnasium applies HumanRendering, which opens the window in
        # this process.
        modes = self.metadata.get("render_modes", [])
        self.metadata["render_modes"] = [mode for mode in modes if mode != "human"]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode; see `gymnasium.Env.reset`."""
        observation = self._batch.reset(None, [seed], options=options)
        super().reset(seed=None if seed is None else int(seed))
        self._observation = self._unbatch(observation)
        return self._observation, dict(self._batch.reset_infos.get(0, {}))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the env; see `gymnasium.Env.step`.

        Raises:
          ActionError: The action does not fit the action space.
          LocalProtocolError: A fault has ended the episode; call `reset`.
          ResetFirst: The env has not been reset yet.
        """
        result = self._batch.step(action)
        info = dict(result.infos.get(0, {}))
        observation = self._unbatch(result.observation)
        if not result.valid[0]:
            info["valid"] = False
            if result.lost[0]:
                observation = copying.deepcopy(self._observation)
        # `__setattr__` of this class is slower.
        self.__dict__["_observation"] = observation
        return (
            observation,
            float(result.reward[0]),
            bool(result.terminated[0]),
            bool(result.truncated[0]),
            info,
        )

    def render(self) -> Any:
        """Render the env according to its `render_mode`."""
        return self._batch.render(0)

    def close(self) -> None:
        """Close the env and end its worker; idempotent."""
        self._batch.close()

    # The following methods access attributes of the env and its wrappers, in the worker
    # or on the server.

    def has_wrapper_attr(self, name: str) -> bool:
        """Return whether the env or one of its wrappers has an attribute.

        On a server that does not expose the attribute, return False, unless the server
        exposes `has_wrapper_attr`.
        """
        try:
            self.get_wrapper_attr(name)
        except AttributeError as error:
            if getattr(error.__cause__, "remote_traceback", True):
                return False
            # The env may have an attribute whose value cannot be sent.
            try:
                return bool(self._batch.call(0, "has_wrapper_attr", name))
            except CallError:
                return False
        return True

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the env or one of its wrappers.

        Raises:
          AttributeError: There is no such attribute, its value cannot be sent, or a
            server does not expose it.
          CallError: The env raised another error.
        """
        if name in _OWN_ATTRIBUTES:
            return getattr(self, name)
        try:
            return self._batch.get_attr(name)[0]
        except CallError as error:
            if error.remote_traceback and not isinstance(error, AttributeError):
                raise
            raise AttributeError(str(error)) from error

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the env or one of its wrappers.

        Args:
          name: Name of the attribute.
          value: A plain value.
          force: Whether to set an attribute that does not exist yet.

        Returns:
          Whether the attribute was set.

        Raises:
          CallError: The attribute cannot be set, or a server does not expose it.
        """
        if force or self.has_wrapper_attr(name):
            self._batch.set_attr(name, [value])
            return True
        return False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the env has."""
        if name in _OWN_ATTRIBUTES or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.get_wrapper_attr(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of this object, or one that only the env has."""
        if name in _OWN_ATTRIBUTES or name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self.set_wrapper_attr(name, value)

    def __repr__(self) -> str:
        return f"<Env<{self._batch.spec.env_name}>>"

    def _unbatch(self, observation: Any) -> Any:
        return unbatch(self.observation_space, observation, [0])[0]
