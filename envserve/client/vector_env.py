"""A batch of envs as a `gymnasium.vector.VectorEnv`.

Any Gymnasium trainer can use it: an episode that a fault ends is returned as truncated.
"""

from __future__ import annotations

import contextlib
import copy as copying
import multiprocessing
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.spaces import Discrete, Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envserve.client.batch_env import BatchEnv, EnvsClosed
from envserve.client.step_result import (
    StepResult,
    final_observations,
    with_last_observation,
)
from envserve.client.vector_infos import batch_infos
from envserve.errors import CallError, EnvserveError, EnvTimeout, LocalProtocolError
from envserve.settings import Autoreset, ObservationMode
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import Array, flatten, unflatten

AUTORESET_MODES: Final[Mapping[Autoreset, AutoresetMode]] = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}
#: Methods that `call` rejects, because `VectorEnv` has methods of the same names.
_NOT_CALLED: Final = ("reset", "step", "close")

_all: Final = np.logical_and.reduce
_any: Final = np.logical_or.reduce


class CallPending(AlreadyPendingCallError, LocalProtocolError):
    """A method was called between an `_async` method and its `_wait`."""


class NoCall(NoAsyncCallError, LocalProtocolError):
    """A `_wait` method was called without a pending operation of its kind."""


class EnvsTimeout(EnvTimeout, multiprocessing.TimeoutError):
    """Not all envs have finished in time. Nothing is lost, and you can wait again."""


def parse_observation_mode(mode: Any) -> ObservationMode:
    """Convert Gymnasium's `observation_mode` to that of a batch.

    Raises:
      TypeError: The mode is a tuple, but does not consist of two spaces.
      ValueError: The mode is unknown.
    """
    # Gymnasium's tests require the text of these errors.
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {mode}"
            )
        return "different"
    if mode not in ("same", "different"):
        raise ValueError(
            f"Invalid `observation_mode`, expected: 'same' or 'different' or tuple of "
            f"single and batch observation space, actual got {mode}"
        )
    choice: ObservationMode = mode
    return choice


def metadata_of(batch: BatchEnv) -> dict[str, Any]:
    """Return the envs' metadata, without values that are not plain; may be empty."""
    return dict(attribute_of(batch, "metadata") or {})


def specs_of(batch: BatchEnv) -> list[gymnasium.envs.registration.EnvSpec | None]:
    """Return the spec of each env, or the registered one if it cannot be read."""
    specs: list[Any] = [None] * batch.num_envs
    with contextlib.suppress(CallError):
        specs = batch.get_attr("spec")
    registered = gymnasium.registry.get(batch.spec.env_name)
    return [spec or registered for spec in specs]


def attribute_of(batch: BatchEnv, name: str) -> Any:
    """Return an attribute of the first env; None if it cannot be read."""
    try:
        return batch.get_attr(name, [0])[0]
    except CallError:
        return None


class VectorEnv(gymnasium.vector.VectorEnv[Any, Any, Array]):
    """A `BatchEnv` with Gymnasium's interface for vector envs.

    If the episode of a row is lost, `truncated` is True in that row, `infos["fault"]`
    contains the reason, and `infos["valid"]` is False. If all rows of a step are valid,
    there is no key "valid".
    """

    def __init__(
        self, batch: BatchEnv, *, copy: bool = True, observation_mode: Any = "same"
    ) -> None:
        """Wrap a batch made with `infos="all"`, and take ownership; see `make_vec`."""
        super().__init__()
        # Closes the batch if this object is garbage-collected without being closed.
        self._finalizer = weakref.finalize(self, batch.close)
        self._finalizer.atexit = False
        self._batch = batch
        batch.reset_call = "reset(options={'reset_mask': ...})"
        batch.steps_ended = True
        self.num_envs = batch.num_envs
        self.autoreset_mode = AUTORESET_MODES[batch.autoreset]
        self._is_same_step = batch.autoreset == "same_step"
        self.single_observation_space = batch.observation_space
        self.observation_space = batch_space(batch.observation_space, self.num_envs)
        if observation_mode == "different":
            spaces = batch.get_attr("observation_space")
            self.single_observation_space = spaces[0]
            self.observation_space = batch_differing_spaces(spaces)
        elif observation_mode != "same":
            self.observation_space, self.single_observation_space = observation_mode
        self.single_action_space = batch.action_space
        self.action_space = batch_space(batch.action_space, self.num_envs)
        self.render_mode = attribute_of(batch, "render_mode")
        self.metadata = {**metadata_of(batch), "autoreset_mode": self.autoreset_mode}
        self._is_copied = copy
        #: Without `copy`, the result that the next step overwrites, and the latest one.
        self._reused: StepResult | None = None
        self._latest: StepResult | None = None
        self._observation: Any = None
        self.closed = False

    def __repr__(self) -> str:
        return f"VectorEnv({self._batch.spec.env_name}, num_envs={self.num_envs})"

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the envs.

        Args:
          seed: An int (row i gets `seed + i`), or one seed or None per row. An env
            whose seed is None continues its random number generator.
          options: Options to pass to each env: plain values. The key "reset_mask", bool
            `[num_envs]`, selects the rows to reset and is not passed to the envs; the
            other rows return their last observation again.

        Returns:
          Observations, and infos as a dict of arrays.
        """
        self._check_idle("reset_async")
        try:
            self.reset_async(seed, options)
            return self.reset_wait()
        finally:
            self._batch.cancel_reset()

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Start a reset without waiting; `reset_wait` returns its result."""
        self._check_idle("reset_async")
        if isinstance(seed, int | np.integer):
            seed = range(int(seed), int(seed) + self.num_envs)
        if seed is not None and (
            not isinstance(seed, Sequence | np.ndarray) or len(seed) != self.num_envs
        ):
            raise ValueError(
                f"seed: expected an int, or one seed for each of {self.num_envs} envs; "
                f"got {seed!r:.200}"
            )
        if not isinstance(options, Mapping | None):
            raise TypeError(f"options: expected a dict or None; got {options!r:.200}")
        rows = np.arange(self.num_envs)
        if options is not None and "reset_mask" in options:
            rows = rows[_checked_mask(options["reset_mask"], self.num_envs)]
            options = {key: options[key] for key in options if key != "reset_mask"}
        seeds = None if seed is None else [seed[row] for row in rows.tolist()]
        is_whole = len(rows) == self.num_envs
        self._batch.send_reset(None if is_whole else rows, seeds, options=options)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset that `reset_async` has started, and return its result.

        Args:
          timeout: Time limit in seconds; None for no limit.

        Raises:
          EnvsTimeout: The reset has not finished in time; call this again to wait
            longer.
          NoCall: No reset was started.
        """
        with self._waiting_for("reset"):
            self._batch.recv_reset(timeout)
        infos = batch_infos(self._batch.reset_infos, self.num_envs)
        self._observation = observation = self._batch.last_observation()
        return observation, infos

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step the envs; see `gymnasium.vector.VectorEnv.step`.

        Raises:
          ActionError: The actions do not fit the action space; no env was stepped.
          EnvError: An env returned a value outside its spaces.
          ResetFirst: The envs have not been reset yet.
          ServerError: A server was lost.
        """
        if self.closed or self._batch.pending:
            self._check_idle("step")
        return self._to_gymnasium(self._batch.step(actions, self._reused))

    def step_async(self, actions: Any) -> None:
        """Start a step without waiting; `step_wait` returns its result."""
        self._check_idle("step_async")
        self._batch.send(actions, together=True)

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Wait for the step that `step_async` has started, and return its result.

        Args:
          timeout: Time limit in seconds; None for no limit.

        Raises:
          EnvsTimeout: The step has not finished in time; call this again to wait
            longer.
          NoCall: No step was started.
        """
        with self._waiting_for("step"):
            rows = np.arange(self.num_envs)
            received = self._batch.recv(
                timeout=timeout, env_indices=rows, out=self._reused
            )
        return self._to_gymnasium(received[1])

    def render(self) -> tuple[Any, ...]:
        """Render all envs according to their `render_mode`."""
        return self.call("render")

    def close_extras(
        self, timeout: float | None = None, terminate: bool = False
    ) -> None:
        """Close the envs; `close` calls this method with its arguments.

        `timeout` and `terminate` have no effect, because closing has its own time
        limits; see `BatchEnv.close`.
        """
        if pending := self._batch.pending:
            gymnasium.logger.warn(
                f"Calling `close` while waiting for a pending call to "
                f"`{pending}` to complete."
            )
        self._batch.close()

    # The following methods are those that `gymnasium.vector.AsyncVectorEnv` has in
    # addition to those of `gymnasium.vector.VectorEnv`.

    @property  # type: ignore[misc]  # read-only, as in AsyncVectorEnv
    def np_random(self) -> Any:
        """The random number generators of the envs, as a tuple of copies."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The last seed of each env, as a tuple."""
        return self.get_attr("np_random_seed")

    def call(self, name: str, /, *arguments: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, or read an attribute that is not callable.

        Raises:
          CallError: The method raised an exception, or a server does not expose it.
        """
        self.call_async(name, *arguments, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *arguments: Any, **kwargs: Any) -> None:
        """Start a `call` without waiting; `call_wait` returns its result."""
        self._check_idle("call")
        if name in _NOT_CALLED:
            raise ValueError(f"{name}: expected {name}() instead of call({name!r})")
        self._batch.send_call(name, *arguments, **kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the call that `call_async` has started, and return its result.

        Args:
          timeout: Time limit in seconds; None for no limit.

        Raises:
          EnvsTimeout: The call has not finished in time; call this again to wait
            longer.
          NoCall: No call was started.
        """
        with self._waiting_for("call"):
            return tuple(self._batch.recv_call(timeout))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env; if it is a method, call it in each env."""
        self._check_idle("get_attr")
        values = tuple(self._batch.get_attr(name))
        return self.call(name) if callable(values[0]) else values

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every env.

        Args:
          name: Name of the attribute.
          values: A list or tuple with one value per env, or one value for all envs.
        """
        self._check_idle("set_attr")
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        self._batch.set_attr(name, values)

    # Gymnasium's tests require the text of the errors that these methods raise.

    def _check_idle(self, name: str) -> None:
        if self.closed:
            raise EnvsClosed(f"{self!r} is closed and can no longer be used")
        if pending := self._batch.pending:
            raise CallPending(
                f"Calling `{name}` while waiting for a pending call to "
                f"`{pending}` to complete; call `{pending}_wait`",
                pending,
            )

    @contextlib.contextmanager
    def _waiting_for(self, name: str) -> Iterator[None]:
        """Check that an operation is pending; convert errors raised during the wait.

        After an error other than a timeout, the operation is no longer pending.
        """
        if self.closed:
            self._check_idle(name)
        if self._batch.pending != name:
            text = f"Calling `{name}_wait` without any prior call to `{name}_async`."
            raise NoCall(text, name)
        try:
            yield
        except EnvTimeout as error:
            raise EnvsTimeout(*error.args) from None
        except EnvserveError:  # discard the other rows, which may have errors, too
            if name == "step":
                self._batch.drain()
            raise

    def _to_gymnasium(
        self, result: StepResult
    ) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Convert a result to the tuple that Gymnasium's `step` returns."""
        if not self._is_copied:
            # Only observation arrays are reused: the other arrays are small, and
            # trainers keep them. Two results alternate, because an episode that a fault
            # ends needs the observations of the previous step.
            is_encoded = self._batch.spec.has_encoded_observations
            self._reused, self._latest = self._latest, None if is_encoded else result
            result = result._replace(
                reward=result.reward.copy(),
                terminated=result.terminated.copy(),
                truncated=result.truncated.copy(),
                valid=result.valid.copy(),
            )
        infos = self._infos(result) if result.infos or self._is_same_step else {}
        if not _all(result.valid):
            if not self._is_same_step:
                observation = with_last_observation(
                    self.single_observation_space, result, self._observation
                )
                result = result._replace(observation=observation)
            infos["valid"] = result.valid
            infos["_valid"] = np.ones(self.num_envs, np.bool_)
        self._observation = result.observation
        return result[0], result.reward, result.terminated, result.truncated, infos

    def _infos(self, result: StepResult) -> dict[str, Any]:
        ended = result.terminated | result.truncated
        if not self._is_same_step or not _any(ended):
            return batch_infos(result.infos, self.num_envs)
        infos, final_infos = dict(result.infos), {}
        observations = np.full(self.num_envs, None, object)
        space = self._batch.observation_space
        last = final_observations(space, result, self._observation)
        for row in ended.nonzero()[0].tolist():
            observations[row] = _copy_observation(self._batch.spec, last[row])
            info = dict(infos.pop(row, {}))
            # In a valid row, the key "fault" comes from the env itself.
            is_lost = not result.valid[row] and "fault" in info
            fault = {"fault": info.pop("fault")} if is_lost else {}
            # A server may send a `reset_info` of any type.
            reset_info = info.pop("reset_info", None)
            reset_info = reset_info if isinstance(reset_info, Mapping) else {}
            infos[row] = {**reset_info, **fault}
            final_infos[row] = {"final_info": info}
        return {
            **batch_infos(infos, self.num_envs),
            **batch_infos(final_infos, self.num_envs),
            "final_obs": observations,
            "_final_obs": ended,
        }


def _copy_observation(spec: EnvSpec, observation: Any) -> Any:
    """Copy a final observation, with scalars of the types that most envs return.

    Discrete values become ints; other scalars become arrays of shape `[]`.
    """
    leaves = copying.deepcopy(flatten(spec.observation_space, observation))
    for index, leaf in enumerate(spec.observation_leaves):
        if isinstance(leaf.space, Discrete):
            leaves[index] = int(leaves[index])
        elif not leaf.shape:
            leaves[index] = np.asarray(leaves[index])
    return unflatten(spec.observation_space, leaves)


def _checked_mask(mask: Any, num_envs: int) -> Array:
    # Gymnasium's tests require the text of these errors.
    name = "`options['reset_mask']` must"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{name} be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{name} have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} have `dtype=np.bool_`, got {mask.dtype}")
    if not _any(mask):
        raise ValueError(
            f"{name} contain a boolean array with at least one True value, got "
            f"reset_mask={mask}"
        )
    return mask
