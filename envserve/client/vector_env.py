"""A batch of envs as `gymnasium.vector.VectorEnv`, for trainers that know Gymnasium.

Faults come in a form that a trainer survives which knows nothing of them: a lost
episode is a truncated one.
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
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from envserve.client.batch_env import BatchEnv, EnvsClosed
from envserve.client.step_result import StepResult, last_rows
from envserve.client.vector_infos import batch_infos
from envserve.errors import CallError, EnvserveError, EnvTimeout, LocalProtocolError
from envserve.settings import Autoreset

Array = np.ndarray[Any, Any]

MODES: Final[Mapping[Autoreset, AutoresetMode]] = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}
_NOT_CALLED: Final = frozenset({"reset", "step", "close"})

_all: Final = np.logical_and.reduce
_any: Final = np.logical_or.reduce


class CallPending(AlreadyPendingCallError, LocalProtocolError):
    """Something else was asked for before `reset_wait` or `step_wait`."""


class NoCall(NoAsyncCallError, LocalProtocolError):
    """`reset_wait` or `step_wait` has nothing to wait for."""


class EnvsTimeout(EnvTimeout, multiprocessing.TimeoutError):
    """Not all envs have finished; nothing is lost, and one can wait again."""


def metadata_of(batch: BatchEnv) -> dict[str, Any]:
    """Returns the envs' metadata; none, if it holds what has no plain form."""
    try:
        return dict(batch.get_attr("metadata", [0])[0])
    except CallError:
        return {}


class VectorEnv(gymnasium.vector.VectorEnv[Any, Any, Array]):
    """Gymnasium's view of a `BatchEnv`.

    In a row whose episode was lost `truncated` is True, `infos["fault"]` says why, and
    `infos["valid"]` is False; there is no such key while all rows are valid.
    """

    def __init__(self, batch: BatchEnv, *, copy: bool = True) -> None:
        """Takes over a batch.

        Args:
          batch: Made with `infos="all"`; this closes it.
          copy: As for `make_vec`.
        """
        super().__init__()
        # Who drops it without closing it keeps no processes and sockets.
        self._finalizer = weakref.finalize(self, batch.close)
        self._finalizer.atexit = False
        self._batch = batch
        batch.reset_call = "reset(options={'reset_mask': ...})"
        self.num_envs = batch.num_envs
        self.autoreset_mode = MODES[batch.autoreset]
        self._is_same_step = batch.autoreset == "same_step"
        self.single_observation_space = batch.observation_space
        self.single_action_space = batch.action_space
        self.observation_space = batch_space(batch.observation_space, self.num_envs)
        self.action_space = batch_space(batch.action_space, self.num_envs)
        (self.render_mode,) = batch.get_attr("render_mode", [0])
        self.metadata = {**metadata_of(batch), "autoreset_mode": self.autoreset_mode}
        self._is_copied = copy
        self._is_encoded = batch.spec.has_encoded_observations
        self._reused: StepResult | None = None
        self._latest: StepResult | None = None
        self._seen: Any = None
        self.closed = False

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the envs.

        Args:
          seed: That of row 0, whose successors are the other rows'; or one per row.
            With None an env goes on with its random numbers.
          options: For the envs, plain values; without "reset_mask", which says the
            rows to reset, bool `[num_envs]`. The others show what they last showed.

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
        """Starts what `reset` does; `reset_wait` returns what has come of it."""
        self._check_idle("reset_async")
        first = int(seed) if isinstance(seed, int | np.integer) else None
        if first is not None:
            seed = range(first, first + self.num_envs)
        if seed is not None and (
            not isinstance(seed, Sequence | np.ndarray) or len(seed) != self.num_envs
        ):
            raise ValueError(
                f"seed: expected an int, or one for each of {self.num_envs} envs; got "
                f"{seed!r:.200}"
            )
        if not isinstance(options, Mapping | None):
            raise TypeError(f"options: expected a dict or None; got {options!r:.200}")
        rows = np.arange(self.num_envs)
        if options is not None and "reset_mask" in options:
            rows = rows[_checked_mask(options["reset_mask"], self.num_envs)]
            others = {key: options[key] for key in options if key != "reset_mask"}
            options = others or None  # envs need not take any
        seeds = None
        if seed is not None and any(each is not None for each in seed):
            seeds = [seed[row] for row in rows.tolist()]
        every = len(rows) == self.num_envs
        self._batch.send_reset(None if every else rows, seeds, options=options)
        if first is not None:
            super().reset(seed=first)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits for what `reset_async` has started.

        Raises:
          EnvsTimeout: It takes longer than `timeout` seconds; one can wait again.
          NoCall: Nothing was started.
        """
        with self._waiting("reset"):
            self._batch.recv_reset(timeout)
        infos = batch_infos(self._batch.reset_infos, self.num_envs)
        self._seen = observation = self._batch.last_observation()
        return observation, infos

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Steps the envs; see `gymnasium.vector.VectorEnv.step`.

        Raises:
          ActionError: The actions do not fit the action space; nothing was stepped.
          EnvError: An env broke its own spaces.
          ResetFirst: There was no reset.
          ServerError: A server was lost.
        """
        if self.closed or self._batch.pending:
            self._check_idle("step")
        return self._converted(self._batch.step(actions, self._reused))

    def step_async(self, actions: Any) -> None:
        """Starts what `step` does; `step_wait` returns what has come of it."""
        self._check_idle("step_async")
        self._batch.send(actions, together=True)

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Waits for what `step_async` has started.

        Raises:
          EnvsTimeout: It takes longer than `timeout` seconds; one can wait again.
          NoCall: Nothing was started.
        """
        with self._waiting("step"):
            rows = np.arange(self.num_envs)
            received = self._batch.recv(
                timeout=timeout, env_indices=rows, out=self._reused
            )
        return self._converted(received[1])

    def render(self) -> tuple[Any, ...]:
        """Returns what each env renders."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """Ends the envs, within 2 seconds even if one hangs."""
        if pending := self._batch.pending:
            gymnasium.logger.warn(
                f"Calling `close` while waiting for a pending call to "
                f"`{pending}` to complete."
            )
        self._finalizer()

    # What AsyncVectorEnv has besides.

    @property
    def np_random_seed(self) -> Any:
        """The seed of each env, as a tuple."""
        return self.get_attr("np_random_seed")

    def call(self, name: str, /, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        """Calls a method of every env, or reads an attribute that is not callable.

        Raises:
          CallError: It raised, or servers do not expose it.
        """
        self._check_idle("call")
        if name in _NOT_CALLED:
            raise ValueError(f"{name}: expected {name}() instead of call({name!r})")
        return tuple(self._batch.call_each(name, *arguments, **named))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns an attribute of every env."""
        self._check_idle("get_attr")
        return tuple(self._batch.get_attr(name))

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute: a list or tuple has a value for each env."""
        self._check_idle("set_attr")
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        self._batch.set_attr(name, values)

    # Gymnasium's tests ask for the words of these errors.

    def _check_idle(self, name: str) -> None:
        if self.closed:
            raise EnvsClosed(f"{self!r} was closed, and can no longer be used")
        if pending := self._batch.pending:
            raise CallPending(
                f"Calling `{name}` while waiting for a pending call to "
                f"`{pending}` to complete; call `{pending}_wait`",
                pending,
            )

    @contextlib.contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """Waits for what is pending, which it is no more unless it takes longer."""
        if self.closed:
            self._check_idle(name)
        if self._batch.pending != name:
            text = f"Calling `{name}_wait` without any prior call to `{name}_async`."
            raise NoCall(text, name)
        try:
            yield
        except EnvTimeout as error:
            raise EnvsTimeout(*error.args) from None
        except EnvserveError:  # the first error of a step is the one to tell
            if name == "step":
                self._batch.drain()
            raise

    def _converted(
        self, result: StepResult
    ) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Says a step in Gymnasium's words."""
        if not self._is_copied:
            # The other arrays are small, and trainers keep them. What was seen last
            # has to outlive the next step where final observations are told.
            written = None if self._is_encoded else result
            self._reused = self._latest if self._is_same_step else written
            self._latest = written
            result = result._replace(
                reward=result.reward.copy(),
                terminated=result.terminated.copy(),
                truncated=result.truncated.copy(),
                valid=result.valid.copy(),
            )
        infos = self._infos(result) if result.infos or self._is_same_step else {}
        self._seen = result.observation
        if not _all(result.valid):
            infos["valid"] = result.valid
            infos["_valid"] = np.ones(self.num_envs, np.bool_)
        return result[0], result.reward, result.terminated, result.truncated, infos

    def _infos(self, result: StepResult) -> dict[str, Any]:
        ended = result.terminated | result.truncated
        if not self._is_same_step or not _any(ended):
            return batch_infos(result.infos, self.num_envs)
        infos, final_infos = dict(result.infos), {}
        observations = np.full(self.num_envs, None, object)
        last = last_rows(self.observation_space, result, self._seen)
        if isinstance(self.single_observation_space, Discrete):
            last = [each.item() for each in last]  # ints, which envs mostly give
        for row in ended.nonzero()[0].tolist():
            observations[row] = copying.deepcopy(last[row])
            info = dict(infos.pop(row, {}))
            is_lost = not result.valid[row] and "fault" in info  # or it is the env's
            fault = {"fault": info.pop("fault")} if is_lost else {}
            begun = info.pop("reset_info", None)  # of a server: it may be anything
            infos[row] = {**(begun if isinstance(begun, Mapping) else {}), **fault}
            final_infos[row] = {"final_info": info}
        return {
            **batch_infos(infos, self.num_envs),
            **batch_infos(final_infos, self.num_envs),
            "final_obs": observations,
            "_final_obs": ended,
        }


def _checked_mask(mask: Any, num_envs: int) -> Array:
    # In Gymnasium's words, which its tests ask for.
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
