"""`BatchEnv`: a batch of envs in worker processes or on servers, with NumPy arrays.

A batch combines one or more lanes: a pool of worker processes on this host, or one lane
per server. With the same seed, it returns the same rows wherever the envs run. All
methods run in the caller's thread. A signal handler may interrupt any of them; a later
call never returns the result of an interrupted call. `lane_group` explains how.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set, Sized
from functools import partial, wraps
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, Self, TypeVar, Unpack

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from envserve.client import factory
from envserve.client.attribute_access import AttributeAccess
from envserve.client.factory import EnvLike, OnFault, OnServerLost
from envserve.client.lane_group import LaneGroup
from envserve.client.link.server_pool import ServerPool
from envserve.client.row_set import RowSet, RowSetCache, check_rows
from envserve.client.stats import BatchStats, StepRecorder
from envserve.client.step_result import (
    StepResult,
    add_infos,
    check_out,
    decode_result,
    gather_result,
)
from envserve.envs.seeding import MAX_ROOT_SEED
from envserve.errors import (
    EnvError,
    EnvserveError,
    EnvStartError,
    EnvTimeout,
    LocalProtocolError,
    SpaceError,
)
from envserve.lane import CallKind, Lane
from envserve.session.client.liveness import Timeouts
from envserve.settings import (
    ActionMode,
    Autoreset,
    EnvOptions,
    LocalOptions,
    ObservationMode,
)
from envserve.slab import OK
from envserve.spaces.action_checks import check_actions
from envserve.spaces.env_spec import EnvSpec, describe, restore
from envserve.spaces.info_columns import RowInfos
from envserve.spaces.leaves import Array, unflatten
from envserve.spaces.variable_length import decode_observation
from envserve.wire.bodies import pack_options

RowIndices = Sequence[int] | Array | None
P = ParamSpec("P")
T = TypeVar("T")


class EnvsClosed(LocalProtocolError, ClosedEnvironmentError):
    """The batch was used after `close`."""


class ResetFirst(LocalProtocolError, ResetNeeded):
    """The batch was stepped before all of its envs were reset."""


def _exclusive(
    method: Callable[Concatenate[BatchEnv, P], T],
) -> Callable[Concatenate[BatchEnv, P], T]:
    """Let a method raise LocalProtocolError while another thread uses the batch."""

    @wraps(method)
    def call(batch: BatchEnv, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not batch._lock.acquire(blocking=False):
            raise batch._in_use_error()
        try:
            return method(batch, *args, **kwargs)
        finally:
            batch._lock.release()

    return call


class BatchEnv:
    """A batch of identical envs, one per row of the arrays `[num_envs, ...]`.

    Create it with `BatchEnv.local` or `BatchEnv.connect`, and close it, preferably with
    a `with` statement. It is not thread-safe: use it from one thread at a time.

    A row is in flight from `send` to `recv`. A signal handler may raise an exception
    (KeyboardInterrupt, for example) in any call. If the call was only waiting, nothing
    is lost; otherwise, the current episode of each row may end with an invalid step.

    Attributes:
      spec: Name and spaces of the envs.
      observation_space: Space of one env's observation.
      action_space: Space of one env's action.
      num_envs: Number of rows.
      lanes: The sources of the rows (a pool, or one lane per server), in row order.
      blocks: The rows of each block, int64 `[n]`. One worker steps the envs of a block
        together, so a block is the smallest unit for `send` and `recv`.
      splits: The rows of each split, int64 `[n]`. There are `num_splits` splits, or
        fewer if there are not enough rows.
      has_reset: Whether all envs have been reset, so that the batch can be stepped.
      reset_infos: With `infos="all"`, maps rows to their info dicts from the last
        `reset`.
      autoreset: Mode in which envs are reset after the end of an episode.
      reset_call: The call that resets a row, as shown in error messages.
      is_single: Whether `step` takes the action of one env, without a batch dimension.
      steps_ended: Whether rows whose episode has ended without a fault can be stepped,
        as in Gymnasium with autoreset "disabled".
    """

    reset_call = "reset(env_indices=...)"
    is_single = steps_ended = False

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        autoreset: Autoreset = "same_step",
        on_fault: OnFault = "truncate",
        padding_after: float = 0.1,
        actions: ActionMode = "check",
        observation_mode: ObservationMode = "same",
    ) -> None:
        """Combine lanes into a batch.

        Args:
          lanes: Started lanes. The batch takes ownership of them and closes them.
          autoreset: The autoreset mode that the lanes were built with.
          on_fault: See `local`.
          padding_after: See `local`.
          actions: The action mode that the lanes were built with.
          observation_mode: The observation mode that the lanes were built with.

        Raises:
          SpaceError: The spaces of two lanes differ.
          TypeError: A name, a spec or functions are passed instead of lanes.
        """
        if not isinstance(lanes, Sequence) or not all(
            hasattr(lane, "submit_step") for lane in lanes
        ):
            raise TypeError(
                f"expected started lanes; got {lanes!r:.200}; use BatchEnv.local(...) "
                f"to run envs on this host, or BatchEnv.connect(...) to use servers"
            )
        self.lanes = tuple(lanes)
        self.spec = _common_spec(self.lanes, observation_mode)
        # Copies, because scripts may change spaces: CleanRL's SAC sets a dtype.
        self.observation_space = restore(describe(self.spec.observation_space))
        self.action_space = restore(describe(self.spec.action_space))
        self._group = LaneGroup(self.lanes, padding_after)
        self._row_sets = RowSetCache(self._group.blocks)
        self.num_envs = len(self._row_sets.all_rows)
        self.blocks = self._row_sets.rows_by(lambda block: block.position)
        self.splits = self._row_sets.rows_by(lambda block: block.split)
        self.autoreset = autoreset
        self._action_mode = actions
        self._raises_faults = on_fault == "raise"
        #: Held while a method runs. The thread that holds it may acquire it again, as a
        #: signal handler that uses the batch does.
        self._lock = threading.RLock()
        self._is_closing = False
        self.has_reset = False
        #: Rows and block positions of the reset in flight, and whether every row of the
        #: batch has been reset at least once when this reset has finished.
        self._pending_reset: tuple[Array, Set[int], bool] | None = None
        self._pending_call: AttributeAccess | None = None
        #: Mask of the rows that must be reset before the next step, bool `[num_envs]`;
        #: used only with autoreset "disabled".
        self._must_reset = np.zeros(self.num_envs, np.bool_)
        self._recorder = StepRecorder()
        #: Why the batch can no longer be used; empty while it can.
        self._unusable = ""
        self.reset_infos: Mapping[int, Mapping[str, Any]] = {}
        _BATCHES.add(self)

    @classmethod
    def local(
        cls,
        env_name: EnvLike,
        num_envs: int | None = None,
        num_workers: int | None = None,
        *,
        on_fault: OnFault = "truncate",
        padding_after: float = 0.1,
        start_timeout: float = 300.0,
        **options: Unpack[LocalOptions],
    ) -> Self:
        """Start envs in worker processes on this host.

        Args:
          env_name: Registered name, like "HalfCheetah-v5", or your own env:
            "my_env.py:Walk", "my_package:Walk-v0", a class, a function, Gymnasium's
            `EnvSpec`, or a list with one function per row; see "Use your own env" in
            the docs.
          num_envs: Number of rows; by default 1, or the number of functions.
          num_workers: Number of worker processes; by default one per core.
          on_fault: Reaction to a failure of an env: "truncate" ends its episode with an
            invalid row; "raise" also raises EnvError. A value outside the env's spaces
            always raises EnvError.
          padding_after: Seconds that a step waits for absent envs, whose worker is
            being replaced or whose server does not reply. After that, the step returns
            padding with status PENDING in their rows. With `math.inf`, or if all envs
            are absent, the step waits until they are available again.
          start_timeout: Time limit for building all envs, in seconds.
          **options: See "Keyword Args".

        Keyword Args:
          seed: Root seed, from which the seed of each env is derived; random by
            default.
          seeded: Whether the first reset of each env uses its seed; True by default.
            If False, envs are reset with seed None, as Gymnasium does by default.
          first_env_index: Index of this batch's row 0 in the larger batch that it is
            part of; 0 by default. The envs get the seeds that they would have in the
            larger batch.
          num_splits: Number of groups of blocks that are stepped independently; 1 by
            default.
          env_kwargs: Arguments of the env's constructor, or a list with those of each
            env; none by default. `{row}` and `{worker}` in strings are replaced by
            numbers.
          wrappers: Wrappers of each env, innermost first, each a dict with its name
            and arguments or, for envs on this host, a class or a function; none by
            default; see "Wrappers" in the docs.
          autoreset: Mode in which envs are reset after their episodes, as in Gymnasium:
            "same_step" (default), "next_step" or "disabled".
          infos: Which info dicts a step returns: "all", "episode_end" (the default;
            only for rows whose episode has ended) or "none".
          spare_envs: Whether each row has a second env, which is reset while the first
            is stepped; False by default.
          nonfinite: Handling of NaN and infinity in observations and rewards:
            "raise" (default) raises EnvError, "mask" ends the episode with an invalid
            step, and "pass" returns them.
          strict_spaces: Whether observations must have exactly the dtypes of their
            space. If False (default), they are cast if NumPy's "same_kind" rule allows
            it.
          vectorized: Whether each block is one vector env, made by the env's
            `vector_entry_point`; False by default.
          actions: Handling of finite actions outside the action space: "check"
            (default) raises ActionError unless the difference is a rounding error,
            "clip" clips them to the bounds of a Box, and "pass" passes them to the env.
            NaN and infinity always raise ActionError.
          observation_mode: Whether the observation spaces of all envs must be equal
            ("same", the default) or may have different bounds ("different"). The batch
            has the space of the first env.
          import_modules: Modules or files that register envs or wrappers; none by
            default.
          preload: Whether the env modules are imported once, in the process from which
            workers are forked; True by default. If False, each worker imports them
            itself, so that they may start threads or use a GPU; see "What forking means
            for envs" in the docs.
          step_timeout: Time limit for one step of one env, in seconds, after which its
            worker is killed; 30 by default.
          gpus: GPUs for the workers, as in CUDA_VISIBLE_DEVICES: worker i uses the GPU
            with index i modulo the number of GPUs. By default, workers see all GPUs.
          reset_timeout: Time limit for constructing one env, for its first step and for
            a reset, in seconds, after which its worker is killed; 120 by default.
          max_restarts: Maximum number of consecutive restarts of a worker without a
            valid step of the failing env; 5 by default. After that, the env's error is
            raised.
          max_infos_kib: Maximum size of a row's infos in KiB; 64 by default. If they
            are larger, the keys with the largest values are omitted.
          crash_dir: Directory for crash repro files; by default, this user's directory
            in the system's temporary directory. None disables crash files.

        Raises:
          EnvStartError: An env cannot be built; contains the worker's traceback.
          TypeError: An option is unknown, or the env or the modules have a wrong type.
          UnknownEnv: The env does not exist.
          ValueError: An option is out of bounds.
          WrapperError: A wrapper is unknown, or has a wrong argument.
        """
        factory.check_choice("on_fault", on_fault, OnFault)
        factory.check_positive(start_timeout=start_timeout)
        settings = factory.local_settings(
            env_name, num_envs, num_workers, options, cls.local
        )
        make = partial(cls, on_fault=on_fault, padding_after=padding_after)
        return factory.start_pool(settings, start_timeout, make)

    @classmethod
    def connect(
        cls,
        env_name: EnvLike,
        addresses: Sequence[str],
        num_envs: int,
        *,
        on_fault: OnFault = "truncate",
        padding_after: float = 0.1,
        connect_timeout: float = 10.0,
        start_timeout: float = 300.0,
        server_lost_after: float = 60.0,
        operation_timeout: float = Timeouts.operation_seconds,
        on_server_lost: OnServerLost = "raise",
        num_servers: int | None = None,
        min_servers: int | None = None,
        insecure: bool = False,
        max_row_mib: int = Timeouts.max_row_mib,
        **options: Unpack[EnvOptions],
    ) -> Self:
        """Connect to servers and lease envs from them, spread evenly over the servers.

        With the same seed, the batch returns the same rows as one made by `local`.

        Args:
          env_name: Name of an env that every server offers. For your own env, use the
            name that the servers were started with: "my_env.py:Walk" or "my_env:Walk".
          addresses: Addresses of servers, like "sim1", "sim1:5555", "tcp://sim1:5555"
            or "ipc:///run/envs"; or sources of addresses: "dns://sims:5555" (all
            addresses of a host name), "file:///path" or "ray://namespace/name". If a
            server is lost, its rows move to another of these servers that has enough
            free envs; see "A cluster" in the docs.
          num_envs: Total number of rows.
          on_fault: See `local`.
          padding_after: See `local`.
          connect_timeout: Time limit for a server's first reply, in seconds.
          start_timeout: Time limit for building all envs, in seconds.
          server_lost_after: Seconds after which a server counts as lost because it does
            not reply, ignores a step, reset or call, or was restarted. Until then, its
            rows are padding; after 5 s of silence, they move to another server that has
            free envs. If the env of a row is replaced, its current episode ends with
            an invalid step.
          operation_timeout: Seconds for which a server may report a step, reset or call
            as running, or take to rebuild envs; after that, it counts as lost. 3600 by
            default, far more than servers allow unless their timeouts were raised.
          on_server_lost: Reaction if a server is lost and no other server has enough
            free envs. "raise" raises ServerLost; the batch must then be closed. "pad"
            continues with padding until a server is found: resets skip the rows of the
            lost server, and calls of these rows raise ServerLost. Steps and resets
            raise it only if the whole batch is padding.
          num_servers: Number of servers to spread the envs over; by default, all
            servers whose address is known now. Servers that are found later can replace
            lost ones.
          min_servers: Minimum number of servers that must be able to create the envs;
            by default, all servers whose address is known now. `connect` waits until
            each server is ready or has failed. The rows of failed servers are padding
            until a server is ready for them.
          insecure: Whether to use TCP without keys; only on a network that you trust.
          max_row_mib: Maximum memory in MiB for the rows of one server. The limit
            protects the client, because the server determines the size of the rows.
          **options: See "Keyword Args".

        Keyword Args:
          seed: See `local`. The other options are also those of `local`: `seeded`,
            `first_env_index`, `num_splits`, `env_kwargs`, `wrappers`, `autoreset`,
            `infos`, `spare_envs`, `nonfinite`, `strict_spaces`, `vectorized`,
            `actions` and `observation_mode`.
            Servers accept only the `env_kwargs` that their operators allow, and only
            wrappers that are registered there.

        Raises:
          AddressError: An address is malformed, its host is unknown, or fewer than
            `min_servers` servers have an address.
          ConnectError: No server replies at an address, or its key is unknown.
          KeyFileError: A key file cannot be read, or other users can read it.
          EnvsBusy: A server has too few free envs.
          RemoteProtocolError: A server violates the protocol, or its rows are too
            large.
          TypeError: An option is unknown.
          UnknownEnv: A server does not offer the env.
          ValueError: An option is out of bounds.
          WrapperError: A server does not offer a wrapper, or it has a wrong argument.
        """
        factory.check_choice("on_fault", on_fault, OnFault)
        factory.check_choice("on_server_lost", on_server_lost, OnServerLost)
        factory.check_positive(
            connect_timeout=connect_timeout,
            start_timeout=start_timeout,
            server_lost_after=server_lost_after,
            operation_timeout=operation_timeout,
            max_row_mib=max_row_mib,
        )
        request = factory.remote_request(env_name, num_envs, options, cls.connect)
        servers = ServerPool(addresses, insecure=insecure)
        timeouts = Timeouts(
            connect_seconds=connect_timeout,
            lost_seconds=server_lost_after,
            operation_seconds=operation_timeout,
            pads_lost_rows=on_server_lost == "pad",
            max_row_mib=max_row_mib,
        )
        make = partial(cls, on_fault=on_fault, padding_after=padding_after)
        return factory.start_remote(
            servers,
            request,
            timeouts,
            start_timeout,
            make,
            num_servers=num_servers,
            min_servers=min_servers,
            insecure=insecure,
        )

    # Resets.

    @_exclusive
    def reset(
        self,
        env_indices: RowIndices = None,
        seeds: Sequence[int | None] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Reset envs and return their first observations.

        The infos are stored in `reset_infos`. Rows that wait for a server (see
        `on_server_lost` and `min_servers`) keep their last observation.

        Args:
          env_indices: Rows to reset; None for all.
          seeds: One seed or None per row. By default, and if all are None, the first
            reset of an env uses the seed that is derived from the root seed (unless
            `seeded` is False), and later resets continue the env's random number
            generator.
          options: Options to pass to each of these envs: plain values (numbers,
            strings, lists, dicts, arrays), at most 16 KiB in total.

        Returns:
          Observations `[len(env_indices), ...]`, in the order of `env_indices`.

        Raises:
          CodecError: The options are too large or contain values that are not plain;
            no env was reset.
          EnvError: An env rejected its seed or the options, and was reset without them.
            Reset all envs before the next step.
          ServerError: A server was lost. Reset all envs before the next step.
        """
        pending = self._pending_reset
        try:
            self.send_reset(env_indices, seeds, options=options)
            return self.recv_reset()
        finally:
            self._pending_reset = pending

    @_exclusive
    def send_reset(
        self,
        env_indices: RowIndices = None,
        seeds: Sequence[int | None] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a `reset` without waiting; the next call must be `recv_reset`.

        Raises:
          CodecError: See `reset`.
          ValueError: A seed is not an int in [0, 2**63).
        """
        encoded = pack_options(options)
        indices = check_rows(env_indices, self.num_envs)
        if seeds is not None:
            _check_one_per_row("seeds", seeds, len(indices))
        for seed in () if seeds is None else seeds:
            is_int = isinstance(seed, int | np.integer)
            if seed is not None and not (is_int and 0 <= seed <= MAX_ROOT_SEED):
                raise ValueError(f"seed: expected an int in [0, 2**63); got {seed!r}")
        if seeds is not None and all(seed is None for seed in seeds):
            seeds = None
        self._begin()
        has_reset, self.has_reset = self.has_reset, False  # until `recv_reset`
        try:
            positions = self._group.start_reset(indices, seeds, encoded)
        except LocalProtocolError:  # no reset was started
            self.has_reset = has_reset
            raise
        is_whole = len(indices) == self.num_envs
        self._pending_reset = indices, positions, has_reset or is_whole

    @_exclusive
    def recv_reset(self, timeout: float | None = None) -> Any:
        """Wait for the reset that `send_reset` has started, and return its result.

        Args:
          timeout: Time limit in seconds; None for no limit.

        Returns:
          Observations, as `reset` returns them.

        Raises:
          EnvTimeout: The reset has not finished in time; call this again to wait
            longer.
          EnvError: See `reset`.
          LocalProtocolError: No reset was started.
          ServerError: A server was lost.
        """
        if self._pending_reset is None:
            raise LocalProtocolError("expected send_reset() before recv_reset()")
        indices, positions, has_reset = self._pending_reset
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            self._group.recover()
            self.reset_infos = self._group.finish_reset(positions, deadline)
        except EnvserveError as error:
            if not isinstance(error, EnvTimeout):
                self._pending_reset = None
            raise
        self._pending_reset = None
        self.has_reset = has_reset
        self._must_reset[indices] = False
        return self.last_observation(indices)

    def cancel_reset(self) -> None:
        """Discard the result of the reset in flight, if there is one."""
        self._pending_reset = None

    def last_observation(self, env_indices: Array | None = None) -> Any:
        """Return the last observation of each row.

        This includes the observations of an interrupted step that has finished.

        Args:
          env_indices: Rows; None for all.

        Returns:
          Observations `[len(env_indices), ...]`.
        """
        indices = np.arange(self.num_envs) if env_indices is None else env_indices
        lane_rows = [lane.rows for lane in self.lanes]
        finished = self._group.queue.outcomes.keys()
        is_current = self._group.absence.current_rows(self.num_envs, finished)
        leaves = _concatenate([rows.observation for rows in lane_rows])
        if not is_current.all():
            finals = _concatenate([rows.final_observation for rows in lane_rows])
            for leaf, final in zip(leaves, finals, strict=True):
                leaf[~is_current] = final[~is_current]
        leaves = [leaf[indices] for leaf in leaves]
        observation = unflatten(self.spec.observation_space, leaves)
        status = np.concatenate([rows.status for rows in lane_rows])
        is_complete = (is_current & (status == OK))[indices]
        host_of = self._group.blocks.host_of
        return decode_observation(
            self.spec, indices, observation, is_complete=is_complete, host_of=host_of
        )

    # Steps.

    def step(self, actions: Any, out: StepResult | None = None) -> StepResult:
        """Step all envs, and wait for the result.

        If a step is interrupted, its result is discarded, except for episode ends,
        which the next step returns.

        Args:
          actions: Arrays `[num_envs, ...]`, nested like the action space.
          out: A result whose arrays are overwritten instead of allocating new arrays;
            its infos are ignored.

        Returns:
          The transitions of all rows.

        Raises:
          ActionError: The actions do not fit the action space; no env was stepped.
          EnvError: An env returned a value outside its spaces, or failed with
            `on_fault="raise"`. Reset all envs before the next step.
          LocalProtocolError: Some rows are in flight, or their episodes have ended.
          ResetFirst: The envs have not been reset yet, or must be reset again.
          ServerError: A server was lost.
          ValueError: `out` has wrong shapes; no env was stepped.
        """
        group = self._group
        # As in `_exclusive`, which would add a function call to each step.
        if not self._lock.acquire(blocking=False):
            raise self._in_use_error()
        try:
            is_ready = self.has_reset and self._pending_call is None
            if group.queue.is_updating or self._unusable or not is_ready:
                self._begin(needs_reset=True)
            if out is not None:
                check_out(self.spec, out, self.num_envs)
            began_at = time.perf_counter()
            all_rows = self._row_sets.all_rows
            num_actions = 0 if self.is_single else self.num_envs
            arrays = check_actions(
                self.spec, actions, None, num_actions, self._action_mode
            )
            if self.autoreset == "disabled":
                self._check_not_ended(all_rows)
            group.send(all_rows, arrays, together=True, cancels_on_interrupt=True)
            ready = group.wait(all_rows.positions, None, math.inf)
            result, failure = self._result(all_rows, out)
            self._recorder.latencies.append(time.perf_counter() - began_at)
            if failure is not None:
                _, error = failure
                # An EnvError discards the other rows of the step, so all envs must be
                # reset. A reset does not help if envs cannot be built any more.
                is_fault = isinstance(error, EnvError)
                self.has_reset = not is_fault or isinstance(error, EnvStartError)
                group.release(ready)
                raise error
            group.release(ready)
            return result
        finally:
            self._lock.release()

    @_exclusive
    def send(
        self, actions: Any, env_indices: RowIndices = None, *, together: bool = False
    ) -> None:
        """Start a step of some envs without waiting for it; `recv` returns the result.

        Args:
          actions: Arrays `[n, ...]`, nested like the action space.
          env_indices: Rows to which the actions belong, in any order. They must be
            whole blocks (see `blocks` and `splits`). None for all rows.
          together: Whether each server sends one reply for all of its rows, once the
            last row has finished. This saves messages if you wait for all rows anyway.
            By default, a server sends one reply per block, so that a slow env delays
            only its block.

        Raises:
          ActionError: The actions do not fit the action space; nothing was sent.
          IndexError: The rows are not whole blocks.
          LocalProtocolError: Some of the rows are in flight, or their episodes have
            ended.
          ResetFirst: The envs have not been reset yet, or must be reset again.
          ServerError: A server was lost.
        """
        self._begin(needs_reset=True)
        row_set, order = self._row_sets.for_rows(env_indices)
        arrays = check_actions(
            self.spec, actions, env_indices, len(row_set), self._action_mode
        )
        self._check_not_ended(row_set)
        if order is not None:
            arrays = [array[order] for array in arrays]
        self._group.send(row_set, arrays, together=together)

    @_exclusive
    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        *,
        env_indices: RowIndices = None,
        out: StepResult | None = None,
    ) -> tuple[Array, StepResult]:
        """Wait for rows in flight, and return those that have finished.

        Args:
          min_envs: Number of rows to wait for; all rows that have finished by then are
            returned. The default waits for the first block, or for all of
            `env_indices`.
          timeout: Time limit in seconds; None for no limit.
          env_indices: Rows to wait for, which must be whole blocks in flight. None for
            any rows in flight.
          out: A result with the same number of rows, whose arrays are overwritten
            instead of allocating new arrays. Pass `env_indices` with it, but not
            `min_envs`.

        Returns:
          The rows (int64 `[n]`, always ascending), and their transitions in that order.
          The keys of `infos` are rows of the batch. The rows can be sent again.

        Raises:
          EnvTimeout: Too few rows have finished in time; a later call returns them.
          EnvError: See `step`; only the block of the failed env was received. Reset its
            rows before you send them again.
          LocalProtocolError: Fewer rows are in flight than requested.
          ServerError: A server was lost, together with its rows.
          ValueError: `out` has wrong shapes; the rows stay in flight.
        """
        self._begin()
        if out is not None and (env_indices is None or min_envs is not None):
            raise ValueError(
                "out: requires env_indices, and cannot be combined with min_envs, "
                "because the number of rows must be known in advance"
            )
        group = self._group
        positions, num_rows = self._row_sets.select_in_flight(
            group.in_flight, min_envs, env_indices
        )
        if out is not None:
            check_out(self.spec, out, num_rows)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        ready = group.wait(positions, num_rows, deadline)
        row_set = self._row_sets.for_blocks(ready)
        if len(row_set) < num_rows:
            raise EnvTimeout(
                f"only {len(row_set)} of {num_rows} rows have finished within "
                f"{timeout} s. Nothing is lost: call recv() again"
            )
        result, failure = self._result(row_set, out)
        if failure is not None:
            position, error = failure
            group.release({position})
            raise error
        group.release(ready)
        return row_set.env_indices, result

    @property
    def is_closed(self) -> bool:
        """Whether the batch can no longer be used."""
        return bool(self._unusable)

    @property
    def num_in_flight(self) -> int:
        """Number of rows that were sent but not received yet."""
        return self._group.blocks.num_rows(self._group.in_flight)

    @property
    def is_waiting(self) -> bool:
        """Whether steps, resets or calls were started and their results not returned.

        Any thread may read this property, also while another one is using the batch.
        """
        return not self._unusable and self._group.is_waiting

    @property
    def pending(self) -> str:
        """The operation in flight: "reset", "step", "call", or "" if there is none."""
        if self._pending_reset or self._pending_call:
            return "reset" if self._pending_reset else "call"
        return "step" if self.num_in_flight else ""

    @_exclusive
    def drain(self) -> None:
        """Discard the results of all rows in flight, without waiting for them.

        The caller must then reset all envs before the next step.
        """
        self.has_reset = False
        self._group.cancel_step()

    @_exclusive
    def cancel_step(self) -> None:
        """Discard the result of the step in flight, without waiting for it.

        Episode ends are not discarded: the next step returns them.
        """
        self._group.cancel_step()

    # Attributes of the envs.

    def call(self, env_index: int, name: str, /, *arguments: Any, **kwargs: Any) -> Any:
        """Call a method of one env, or read an attribute that is not callable.

        Args:
          env_index: Row of the env.
          name: Name of the attribute; servers allow only exposed attributes.
          *arguments: Positional arguments. They must be plain values: numbers, strings,
            bytes, lists, dicts or arrays.
          **kwargs: Keyword arguments, also plain values.

        Returns:
          The method's return value, or the attribute's value.

        Raises:
          CallError: The method raised an exception, or the server does not expose it;
            contains the worker's traceback.
        """
        return self._access([env_index], "call", name, arguments, kwargs)[0]

    def call_each(
        self,
        name: str,
        /,
        *arguments: Any,
        env_indices: RowIndices = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a method of several envs, and return one value per env.

        The envs run the call concurrently. The call takes one round trip to each
        server, or several if the values are larger than a few MiB.

        Args:
          name: See `call`.
          *arguments: See `call`; the same for all envs.
          env_indices: Rows of the envs; None for all.
          **kwargs: See `call`; the same for all envs.

        Raises:
          CallError: See `call`, for the first env that failed; raised once all envs
            have finished.
        """
        return self._access(env_indices, "call", name, arguments, kwargs)

    def get_attr(self, name: str, env_indices: RowIndices = None) -> list[Any]:
        """Return an attribute of each env; methods become functions that call them.

        Args:
          name: Name of the attribute; servers allow only exposed attributes.
          env_indices: Rows of the envs; None for all.

        Raises:
          CallError: An env has no such attribute, or its value is not a plain value.
        """
        return self._access(env_indices, "get", name)

    def set_attr(
        self, name: str, values: Sequence[Any], env_indices: RowIndices = None
    ) -> None:
        """Set an attribute of several envs, with one value per env.

        If an env is replaced because it raised an exception, the new env also gets the
        value. If a worker or server is lost, the value is not set in new envs.

        Args:
          name: Name of the attribute; servers allow only exposed attributes.
          values: One plain value per env.
          env_indices: Rows of the envs; None for all.

        Raises:
          CallError: The attribute cannot be set, or a value is not a plain value.
          ValueError: The number of values differs from the number of envs.
        """
        rows = check_rows(env_indices, self.num_envs).tolist()
        _check_one_per_row("values", values, len(rows))
        self._access(rows, "set", name, dict(zip(rows, values, strict=True)))

    def render(self, env_index: int | RowIndices = None) -> Any:
        """Render envs according to their `render_mode`.

        Args:
          env_index: One row, several rows, or None for all rows.

        Returns:
          The return value of the env's `render` if `env_index` is an int; otherwise a
          list of these values.
        """
        if isinstance(env_index, int | np.integer):
            return self.call(int(env_index), "render")
        return self.call_each("render", env_indices=env_index)

    def send_call(self, name: str, /, *arguments: Any, **kwargs: Any) -> None:
        """Start `call_each` of all envs; the next call must be `recv_call`."""
        self._pending_call = self._start_access(None, "call", name, arguments, kwargs)

    @_exclusive
    def recv_call(self, timeout: float | None = None) -> list[Any]:
        """Wait for the call that `send_call` has started; return one value per env.

        Args:
          timeout: Time limit in seconds; None for no limit.

        Raises:
          CallError: See `call_each`.
          EnvTimeout: The call has not finished in time; call this again to wait longer.
          LocalProtocolError: No call was started.
        """
        if self._pending_call is None:
            raise LocalProtocolError("expected send_call() before recv_call()")
        access, self._pending_call = self._pending_call, None
        self._group.recover()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            return access.finish(deadline)
        except EnvTimeout:
            self._pending_call = access
            raise

    @_exclusive
    def _access(
        self,
        env_indices: RowIndices,
        kind: CallKind,
        name: str,
        arguments: Sequence[Any] | Mapping[int, Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        access = self._start_access(env_indices, kind, name, arguments, kwargs or {})
        return access.finish(math.inf)

    @_exclusive
    def _start_access(
        self,
        env_indices: RowIndices,
        kind: CallKind,
        name: str,
        arguments: Sequence[Any] | Mapping[int, Any],
        kwargs: Mapping[str, Any],
    ) -> AttributeAccess:
        if not isinstance(name, str):
            raise TypeError(f"expected an attribute name of type str; got {name!r:.99}")
        self._begin()
        rows = check_rows(env_indices, self.num_envs).tolist()
        return AttributeAccess(
            self._group, rows, kind, name, arguments, kwargs, self.call
        )

    # The batch as a whole.

    def stats(self) -> BatchStats:
        """Return step and fault counts, and the latencies of recent steps."""
        return self._recorder.stats(self.lanes)

    @_exclusive
    def close(self) -> None:
        """Close all envs; idempotent.

        Local envs have 10 s for `close`, after which their workers are killed; workers
        that are still executing another operation are killed after 1 s, and so are all
        workers on servers. This method waits at most 2 s for servers.
        """
        if self._unusable or self._is_closing:  # or a signal handler closes it again
            return
        try:
            self._is_closing = True
            self._group.queue.close()
            factory.close_lanes(self.lanes)
            self._unusable = "the batch is already closed"
        finally:
            self._is_closing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a BatchEnv cannot be copied or pickled, because its envs belong to this "
            "process; create it in the process that uses it"
        )

    def __repr__(self) -> str:
        parts = ", ".join(f"{lane.num_envs} {lane.name}" for lane in self.lanes)
        state = "closed" if self._unusable else "open"
        return (
            f"<BatchEnv {self.spec.env_name}, {self.num_envs} envs: {parts}; {state}>"
        )

    def _begin(self, *, needs_reset: bool = False) -> None:
        """Check that the batch can be used; recover from an interrupted call."""
        if self._unusable:
            raise EnvsClosed(f"{self.spec.env_name}: {self._unusable}")
        self._group.recover()
        if self._pending_reset is not None:
            raise LocalProtocolError("a reset is in flight; call recv_reset() first")
        if self._pending_call is not None:
            raise LocalProtocolError("a call is in flight; call recv_call() first")
        if needs_reset and not self.has_reset:
            raise ResetFirst("call reset() for all envs before the next step")

    def _in_use_error(self) -> LocalProtocolError:
        return LocalProtocolError(
            f"{self.spec.env_name}: another thread is using this batch; use it from "
            "one thread at a time, or create a batch for each thread"
        )

    def _check_not_ended(self, row_set: RowSet) -> None:
        ended = row_set.env_indices[self._must_reset[row_set.env_indices]]
        if ended.size:
            raise LocalProtocolError(
                f"the episodes of envs {ended.tolist()} have ended; "
                f"call {self.reset_call} before the next step"
            )

    def _result(
        self, row_set: RowSet, out: StepResult | None
    ) -> tuple[StepResult, tuple[int, EnvserveError] | None]:
        """Copy the rows of the lanes into a result, with padding and late rows.

        Returns:
          The result; and, if an error must be raised, the position of the first failed
          block and the error, otherwise None.
        """
        infos: RowInfos | None = None
        first_failure = None
        outcomes = self._group.queue.outcomes
        for block in row_set.blocks:
            outcome = outcomes.get(block.position)  # None for padding
            if outcome is not None and (
                outcome.infos or outcome.faults or outcome.error
            ):
                infos = RowInfos() if infos is None else infos
                error = add_infos(infos, outcome, block, self._raises_faults)
                if error is not None and first_failure is None:
                    first_failure = (block.position, error)
        info_dicts = {} if infos is None else infos.simplified()
        result = gather_result(self.spec, row_set, info_dicts, out)
        absence = self._group.absence
        if absence.padded or absence.awaited_late_steps:
            absence.mark_rows(self.spec, row_set, result)
        if self.spec.has_encoded_observations:
            host_of = self._group.blocks.host_of
            result = decode_result(self.spec, result, row_set.env_indices, host_of)
        if self.autoreset == "disabled":
            ended = result.terminated | result.truncated
            if self.steps_ended:
                ended = result.lost
            self._must_reset[row_set.env_indices] = ended
        if first_failure is None:
            recorder = self._recorder
            recorder.steps += 1
            recorder.rows += len(result.valid)
            if b"\0" in result.valid.tobytes():
                recorder.count_invalid(result.valid, result.status)
        return result, first_failure


#: All batches of this process.
_BATCHES: Final = weakref.WeakSet[BatchEnv]()


def _check_one_per_row(name: str, values: Sequence[Any], num_rows: int) -> None:
    """Raise ValueError unless the values are a list or array of `num_rows` elements."""
    is_single = isinstance(values, str) or not isinstance(values, Sized)
    got = repr(values) if is_single else len(values)
    if got != num_rows:
        raise ValueError(f"expected {num_rows} {name}, one per env; got {got}")


def _disable_batches_in_child() -> None:
    """Make all batches unusable in a forked child: their envs belong to the parent."""
    for batch in _BATCHES:
        batch._unusable = (
            "the batch belongs to the process that created it; create a new batch in "
            "this forked child"
        )
        batch._pending_reset = batch._pending_call = None
        # Another thread of the parent may have held the lock during the fork.
        batch._lock = threading.RLock()


os.register_at_fork(after_in_child=_disable_batches_in_child)


def _common_spec(lanes: Sequence[Lane], observation_mode: str) -> EnvSpec:
    """Return the spec of all lanes; raise SpaceError if they differ."""
    first = lanes[0]
    for lane in lanes[1:]:
        different = first.spec.differences(lane.spec, observation_mode)
        if different:
            raise SpaceError(
                f"{lane.name} and {first.name} have different spaces: "
                f"{'; '.join(different)}; install the same env version everywhere"
            )
    return first.spec


def _concatenate(parts: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
