"""Many envs as one: actions in, arrays `[num_envs, ...]` out.

Rows come from any mix of lanes (worker processes of this host, servers) and are the
same wherever they run. The result of a call that was interrupted never answers a later
call; `lane_group` explains how.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence, Set
from functools import partial
from itertools import groupby
from typing import Any, Final, Self, Unpack

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.spaces import Space

from envserve.client import factory
from envserve.client.factory import EnvWord, OnFault, OnServerLost
from envserve.client.lane_group import LaneGroup
from envserve.client.link.server_pool import ServerPool
from envserve.client.row_set import RowSet, RowSets, check_rows
from envserve.client.stats import BatchStats, StepRecorder
from envserve.client.step_result import (
    StepResult,
    add_infos,
    decode_result,
    gather_result,
)
from envserve.envs.seeding import MAX_ROOT_SEED
from envserve.errors import (
    CallError,
    EnvError,
    EnvserveError,
    EnvTimeout,
    LocalProtocolError,
    RemoteProtocolError,
    SpaceError,
)
from envserve.lane import Call, CallKind, Lane
from envserve.session.client.liveness import Timeouts
from envserve.settings import Autoreset, EnvOptions, LocalOptions
from envserve.slab import Status
from envserve.spaces import codec
from envserve.spaces.action_checks import check_actions
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import unflatten
from envserve.spaces.variable_length import decode_observation
from envserve.wire.bodies import pack_options
from envserve.worker.attribute_calls import MAX_RESULT_VALUES

__all__ = ["BatchEnv", "BatchStats", "EnvsClosed", "ResetFirst", "StepResult"]

Array = np.ndarray[Any, Any]
RowIndices = Sequence[int] | Array | None

_OK: Final = int(Status.OK)
#: Longest values of `set_attr` for several rows of a block in one message, in bytes;
#: longer ones are set row after row, because a server does not accept more at once.
_MAX_SET_BYTES: Final = 1 << 10

_all: Final = np.logical_and.reduce


class EnvsClosed(LocalProtocolError, ClosedEnvironmentError):
    """The envs were used after `close`."""


class ResetFirst(LocalProtocolError, ResetNeeded):
    """The envs were stepped before all of them were reset."""


class BatchEnv:
    """A batch of equal envs.

    Make it with `BatchEnv.local` or `BatchEnv.connect`, or from lanes. Use it from one
    thread at a time, and close it, preferably by `with`.

    A row is in flight from `send` to `recv`. An exception that a signal handler raises,
    such as KeyboardInterrupt, may cut any call short. While the call only waits, that
    costs nothing; otherwise it costs each row an episode at most.

    Attributes:
      spec: Name and spaces of the envs.
      observation_space: Space of one env's observation.
      action_space: Space of one env's action.
      num_envs: Number of rows.
      lanes: The pools and servers that the rows come from, in row order.
      blocks: The rows of each block, int64 `[n]`. One worker steps the envs of a block
        together, so a block is the least that can be sent and received.
      splits: The rows of each group of blocks, int64 `[n]`; there are `num_splits`
        groups, or fewer if there are too few rows.
      reset_infos: Info dict by row of the last `reset`, with `infos="all"`.
      autoreset: When the env of an ended episode is reset.
      reset_call: The call that resets a row, for error messages.
    """

    reset_call = "reset(env_indices=...)"

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        autoreset: Autoreset = "same_step",
        on_fault: OnFault = "truncate",
        padding_after: float = 0.1,
    ) -> None:
        """Make a batch of lanes.

        Args:
          lanes: Lanes that are ready. The batch owns them from now on.
          autoreset: The mode that the lanes were built with.
          on_fault: As for `local`.
          padding_after: As for `local`.

        Raises:
          SpaceError: The spaces of two lanes differ.
        """
        self.lanes = tuple(lanes)
        self.spec = _common_spec(self.lanes)
        self.observation_space: Space[Any] = self.spec.observation_space
        self.action_space: Space[Any] = self.spec.action_space
        self._group = LaneGroup(self.lanes, padding_after)
        self._row_sets = RowSets(self._group.blocks)
        self.num_envs = len(self._row_sets.everything)
        self.blocks = self._row_sets.rows_by(lambda block: block.position)
        self.splits = self._row_sets.rows_by(lambda block: block.split)
        self.autoreset = autoreset
        self._raises_faults = on_fault == "raise"
        self._has_reset = False
        #: Rows and blocks of a reset in flight, and whether all rows are reset then.
        self._resetting: tuple[Array, Set[int], bool] | None = None
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._recorder = StepRecorder()
        self._is_closed = False
        self.reset_infos: Mapping[int, Mapping[str, Any]] = {}
        self._is_encoded = self.spec.has_encoded_observations

    @classmethod
    def local(
        cls,
        env_name: EnvWord,
        num_envs: int,
        num_workers: int | None = None,
        *,
        on_fault: OnFault = "truncate",
        padding_after: float = 0.1,
        start_timeout: float = 300.0,
        **options: Unpack[LocalOptions],
    ) -> Self:
        """Start envs in worker processes of this host.

        Args:
          env_name: Registered name, like "HalfCheetah-v5"; or your env, as
            "my_env.py:Walk", as "my_package:Walk-v0", or as a class or function that
            can be imported; see docs/own-envs.md.
          num_envs: Number of rows.
          num_workers: Number of worker processes; by default one per core.
          on_fault: What a failed env does: "truncate" ends its episode with an invalid
            row; "raise" also raises EnvError. A value that does not fit the env's
            spaces always raises.
          padding_after: Seconds that a step waits for envs that are absent because
            their worker is being replaced or their server does not answer. Then their
            rows are padding, with status PENDING, and the step returns. With `math.inf`
            a step waits until they are back. If all envs are absent, it always waits.
          start_timeout: Seconds until all envs must be built.
          **options: See "Keyword Args".

        Keyword Args:
          seed: Root seed, from which the seed of each env follows; at random by
            default.
          seeded: Whether the first reset of each env gets its seed. With False it gets
            None, as in Gymnasium. True by default.
          first_env_index: Number of row 0, if this batch is a part of a larger one
            whose seeds it shares; 0 by default.
          num_splits: Number of groups of blocks that can be stepped independently; 1 by
            default.
          env_kwargs: Arguments of the env's constructor; none by default.
          wrappers: Wrappers of each env, the innermost first, each a dict of its name
            and arguments; none by default; see docs/wrappers.md.
          autoreset: When the env of an ended episode is reset, as in Gymnasium:
            "same_step" (default), "next_step" or "disabled".
          infos: Which info dicts a step returns: of "all" rows, of rows at an
            "episode_end" (default), or "none".
          spare_envs: Whether each row has a second env, which is reset while the first
            is stepped; False by default.
          nonfinite: What NaN and infinity in observations and rewards do: "raise"
            EnvError (default), "mask" the row as lost, or "pass".
          strict_spaces: Whether observations must have the dtypes of their space. With
            False, the default, they are cast where NumPy calls that "same kind".
          vectorized: Whether each block is one vector env, made by the env's
            `vector_entry_point`; False by default.
          import_modules: Modules or files that register envs or wrappers; none by
            default.
          step_timeout: Seconds that a step of one env may take before its worker is
            killed; 30 by default.
          reset_timeout: Seconds that a reset or the construction of one env may take;
            120 by default.
          max_restarts: How often a worker is replaced that ends without having stepped
            in between, before its envs are given up; 5 by default.
          max_infos_kib: Largest size of a row's infos in KiB. If they are larger, the
            largest keys are left out; 64 by default.
          crash_dir: Folder for repro files of crashes; by default a folder of this user
            in the system's temporary folder. None writes no files.

        Raises:
          EnvStartError: The envs cannot be built; has the worker's traceback.
          TypeError: An option is unknown, or the env or the modules have a wrong type.
          UnknownEnv: The env does not exist, or workers cannot import it.
          ValueError: An option is out of bounds.
          WrapperError: A wrapper is unknown, or an argument of it is wrong.
        """
        factory.check_choice("on_fault", on_fault, OnFault)
        settings = factory.local_settings(
            env_name, num_envs, num_workers, options, cls.local
        )
        make = partial(cls, on_fault=on_fault, padding_after=padding_after)
        return factory.start_pool(settings, start_timeout, make)

    @classmethod
    def connect(
        cls,
        env_name: EnvWord,
        addresses: Sequence[str],
        num_envs: int,
        *,
        on_fault: OnFault = "truncate",
        padding_after: float = 0.1,
        connect_timeout: float = 10.0,
        start_timeout: float = 300.0,
        server_lost_after: float = 60.0,
        on_server_lost: OnServerLost = "raise",
        num_servers: int | None = None,
        min_servers: int | None = None,
        insecure: bool = False,
        max_row_mib: int = Timeouts.max_row_mib,
        **options: Unpack[EnvOptions],
    ) -> Self:
        """Get envs from servers, spread evenly over them.

        The same seed gives the same rows as `local` does.

        Args:
          env_name: Name of an env that every server offers. Your env has the name that
            its servers were started with: "my_env.py:Walk", or "my_env:Walk".
          addresses: Servers, like "sim1", "sim1:5555", "tcp://sim1:5555",
            "ipc:///tmp/envs"; or sources of servers: "dns://sims:5555" for all
            addresses of a host name, "file:///path", "ray://namespace/name". If a
            server is gone, its rows move to another of these that has enough free envs;
            see docs/cluster.md.
          num_envs: Number of rows in all.
          on_fault: As for `local`.
          padding_after: As for `local`.
          connect_timeout: Seconds within which a server must answer at first.
          start_timeout: Seconds until all envs must be built.
          server_lost_after: Seconds to wait for a server that does not answer or was
            restarted. Meanwhile its rows are padding. New envs cost each row an
            episode.
          on_server_lost: What happens after that time if no other server has enough
            free envs. "raise" raises ServerLost. "pad" continues with padding until a
            server has, and raises ServerLost only if no row is left.
          num_servers: Number of servers to spread the envs over; by default as many as
            have an address now. Servers that are found later can take the place of lost
            ones.
          min_servers: Number of servers that must answer before this returns; by
            default all that have an address now. The rows of the others are padding
            until those answer.
          insecure: Whether to use no keys on tcp, in a network that you trust.
          max_row_mib: Most memory in MiB for the rows of one server. The server sets
            their size, so this protects the client.
          **options: See "Keyword Args".

        Keyword Args:
          seed: As for `local`, and so are `seeded`, `first_env_index`, `num_splits`,
            `env_kwargs`, `wrappers`, `autoreset`, `infos`, `spare_envs`, `nonfinite`,
            `strict_spaces` and `vectorized`. Servers accept only the `env_kwargs` and
            wrappers that they were started with.

        Raises:
          AddressError: An address has no valid form, its host is unknown, or fewer than
            `min_servers` servers have an address.
          ConnectError: No server answers at an address, or its key is unknown.
          KeyFileError: A key file cannot be read, or other users can read it.
          EnvsBusy: A server has too few free envs.
          RemoteProtocolError: A server breaks the protocol, or its rows are too large.
          TypeError: An option is unknown.
          UnknownEnv: A server does not offer the env.
          ValueError: An option is out of bounds.
          WrapperError: A server does not know a wrapper, or an argument of it is wrong.
        """
        factory.check_choice("on_fault", on_fault, OnFault)
        factory.check_choice("on_server_lost", on_server_lost, OnServerLost)
        servers = ServerPool(addresses, insecure=insecure)
        request = factory.remote_request(env_name, num_envs, options, cls.connect)
        timeouts = Timeouts(
            connect_seconds=connect_timeout,
            lost_seconds=server_lost_after,
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

    def reset(
        self,
        env_indices: RowIndices = None,
        seeds: Sequence[int | None] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Reset envs and return their first observations.

        Args:
          env_indices: Rows to reset; None for all.
          seeds: A seed for each of these rows, or None, which its env gets then. By
            default the first reset of an env uses the seed that follows from the root
            seed (with `seeded`), and a later reset continues its random numbers.
          options: Plain values for each of these envs, at most 16 KiB in all.

        Returns:
          Observations `[len(env_indices), ...]`, in the order of `env_indices`.

        Raises:
          CodecError: The options are not plain values, or too large; nothing was reset.
          EnvError: An env did not accept its seed or the options, and was reset without
            them. All envs have to be reset before the next step.
          ServerError: A server was lost.
        """
        self.send_reset(env_indices, seeds, options=options)
        try:
            return self.recv_reset()
        finally:
            self.cancel_reset()

    def send_reset(
        self,
        env_indices: RowIndices = None,
        seeds: Sequence[int | None] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a reset without waiting; only `recv_reset` may follow.

        Raises:
          CodecError: As for `reset`.
          ValueError: A seed is not an int in [0, 2**63).
        """
        encoded = pack_options(options)
        indices = check_rows(env_indices, self.num_envs)
        if seeds is not None and len(seeds) != len(indices):
            raise ValueError(f"expected {len(indices)} seeds; got {len(seeds)}")
        for seed in () if seeds is None else seeds:
            is_int = isinstance(seed, int | np.integer)
            if seed is not None and not (is_int and 0 <= seed <= MAX_ROOT_SEED):
                raise ValueError(f"seed: expected an int in [0, 2**63); got {seed!r}")
        self._begin()
        has_reset, self._has_reset = self._has_reset, False  # in case of an interrupt
        try:
            positions = self._group.start_reset(indices, seeds, encoded)
        except LocalProtocolError:  # nothing was started
            self._has_reset = has_reset
            raise
        self._resetting = indices, positions, has_reset or env_indices is None

    def recv_reset(self, timeout: float | None = None) -> Any:
        """Wait for the reset that `send_reset` has started; return as `reset` does.

        Args:
          timeout: Seconds to wait; without limit by default.

        Raises:
          EnvTimeout: The reset takes longer; the next call continues to wait.
          EnvError: As for `reset`.
          LocalProtocolError: No reset was started.
          ServerError: A server was lost.
        """
        if self._resetting is None:
            raise LocalProtocolError("expected send_reset() before recv_reset()")
        indices, positions, has_reset = self._resetting
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        try:
            self._group.recover()
            self.reset_infos = self._group.finish_reset(positions, deadline)
        except EnvserveError as error:
            if not isinstance(error, EnvTimeout):
                self._resetting = None
            raise
        self._resetting = None
        self._has_reset = has_reset
        self._ended[indices] = False
        return self.last_observation(indices)

    def cancel_reset(self) -> None:
        """Stop waiting for the reset that `send_reset` has started, if any."""
        self._resetting = None

    def last_observation(self, env_indices: Array | None = None) -> Any:
        """Return the last observations of rows, `[len(env_indices), ...]`.

        Args:
          env_indices: Rows; None for all.
        """
        indices = np.arange(self.num_envs) if env_indices is None else env_indices
        every = [lane.rows for lane in self.lanes]
        ended = self._group.queue.outcomes.keys()
        is_shown = self._group.absence.shown_rows(self.num_envs, ended)
        leaves = _joined([rows.observation for rows in every])
        if not is_shown.all():
            finals = _joined([rows.final_observation for rows in every])
            for leaf, final in zip(leaves, finals, strict=True):
                leaf[~is_shown] = final[~is_shown]
        observation = unflatten(
            self.spec.observation_space, [leaf[indices] for leaf in leaves]
        )
        is_complete = is_shown & (
            np.concatenate([rows.status for rows in every]) == _OK
        )
        return decode_observation(
            self.spec, indices, observation, is_complete=is_complete[indices]
        )

    # Steps.

    def step(self, actions: Any, out: StepResult | None = None) -> StepResult:
        """Step all envs.

        The result of an interrupted step is discarded, except episode ends: the next
        step reports them.

        Args:
          actions: Arrays `[num_envs, ...]`, nested as the action space.
          out: Arrays to write to instead of new ones; its infos are ignored.

        Raises:
          ActionError: The actions do not fit the action space; nothing was stepped.
          EnvError: A value did not fit its env's spaces, or an env failed while
            `on_fault="raise"`. All envs have to be reset before the next step.
          LocalProtocolError: Some rows are in flight, or their episodes have ended.
          ServerError: A server was lost.
        """
        group = self._group
        if group.queue.is_updating or self._is_closed or not self._has_reset:
            self._begin(needs_reset=True)
        if out is not None:
            self._check_out()
        began_at = time.perf_counter()
        everything = self._row_sets.everything
        arrays = check_actions(self.spec, actions, None, self.num_envs)
        if self.autoreset == "disabled":
            self._check_not_ended(everything)
        group.send(everything, arrays, together=True, is_cancelled=True)
        ready = group.wait(everything.positions, None, math.inf)
        result, error = self._result(everything, out)
        self._recorder.latencies.append(time.perf_counter() - began_at)
        if error is not None:
            # The other rows of the step are not returned, so all have to be reset.
            self._has_reset = type(error[1]) is not EnvError
            group.release(ready)
            raise error[1]
        group.release(ready)
        return result

    def send(
        self, actions: Any, env_indices: RowIndices = None, *, together: bool = False
    ) -> None:
        """Start a step of some envs without waiting for it.

        Args:
          actions: Arrays `[n, ...]`, nested as the action space.
          env_indices: The rows that the actions are for, in any order; whole blocks
            (see `blocks`, `splits`). None for all.
          together: Whether each server answers only when all of its rows are done:
            fewer messages, if you wait for all of them. By default each block is
            answered when it is done, so that a slow env delays only its own block.

        Raises:
          ActionError: The actions do not fit the action space; nothing was sent.
          IndexError: The rows are not whole blocks.
          LocalProtocolError: Some of the rows are in flight.
          ServerError: A server was lost.
        """
        self._begin(needs_reset=True)
        row_set, order = self._row_sets.of_rows(env_indices)
        arrays = check_actions(self.spec, actions, env_indices, len(row_set))
        self._check_not_ended(row_set)
        if order is not None:
            arrays = [array[order] for array in arrays]
        self._group.send(row_set, arrays, together=together)

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
          min_envs: Number of rows to wait for; all that have finished by then are
            returned. By default this waits for the first block, or for all of
            `env_indices`.
          timeout: Seconds to wait; without limit by default.
          env_indices: Wait for these rows only, whole blocks that are in flight.
          out: Arrays of exactly as many rows to write to instead of new ones; only
            with `env_indices` and without `min_envs`.

        Returns:
          The rows (int64 `[n]`, ascending, whatever order they were sent in), and their
          step, whose infos are by row of the batch. The rows can be sent again.

        Raises:
          EnvTimeout: Fewer rows have finished; the next call returns them.
          EnvError: As for `step`; only the rows of that env's block are received.
          LocalProtocolError: Fewer rows are in flight.
          ServerError: A server was lost, and with it the rows that it had.
          ValueError: `out` has other shapes; the rows stay in flight.
        """
        self._begin()
        if out is not None and (env_indices is None or min_envs is not None):
            raise ValueError(
                "out: expected env_indices and no min_envs with it; else the number "
                "of rows is not known before"
            )
        if out is not None:
            self._check_out()
        group = self._group
        positions, num_rows = self._row_sets.choose(
            group.in_flight, min_envs, env_indices
        )
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        ready = group.wait(positions, num_rows, deadline)
        row_set = self._row_sets.of_blocks(ready)
        if len(row_set) < num_rows:
            raise EnvTimeout(
                f"expected {num_rows} rows within {timeout} s; {len(row_set)} have "
                "finished; nothing is lost, the next recv() gets them"
            )
        result, error = self._result(row_set, out)
        if error is not None:
            group.release({error[0]})
            raise error[1]
        group.release(ready)
        return row_set.env_indices, result

    @property
    def num_in_flight(self) -> int:
        """Number of rows that were sent and not received."""
        return self._group.blocks.num_rows(self._group.in_flight)

    @property
    def pending(self) -> str:
        """What has to be waited for: "reset", "step", or "" for nothing."""
        return "reset" if self._resetting else "step" if self.num_in_flight else ""

    def drain(self) -> None:
        """Receive all rows in flight and discard them; then reset all envs."""
        self._has_reset = False
        while self.num_in_flight:
            with contextlib.suppress(EnvError):
                self.recv(self.num_in_flight)

    def cancel_step(self) -> None:
        """Discard the step that is in flight, as an interrupted `step` is discarded."""
        self._group.cancel_step()

    # Attributes of the envs.

    def call(self, env_index: int, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Call a method of one env, or read an attribute that is not callable.

        Args:
          env_index: Row of the env.
          name: Name of the attribute; servers allow only those that they expose.
          *arguments: Plain values: numbers, strings, bytes, lists, dicts, arrays.
          **named: Plain values, by name.

        Raises:
          CallError: The method raised; has the traceback from the worker.
        """
        return self._access([env_index], "call", name, arguments, named)[0]

    def call_each(
        self,
        name: str,
        /,
        *arguments: Any,
        env_indices: RowIndices = None,
        **named: Any,
    ) -> list[Any]:
        """Call a method of some envs, or of all; return a value for each.

        All envs are asked at once, in one round trip to each server, unless their
        values are larger than a few MiB. An error is raised once all have answered.
        """
        return self._access(env_indices, "call", name, arguments, named)

    def get_attr(self, name: str, env_indices: RowIndices = None) -> list[Any]:
        """Return an attribute of some envs, or of all."""
        return self._access(env_indices, "get", name)

    def set_attr(
        self, name: str, values: Sequence[Any], env_indices: RowIndices = None
    ) -> None:
        """Set an attribute of some envs, or of all, each to its own value.

        An env that is replaced because it failed gets the value again; one whose worker
        or server was lost does not, nor does a vector env.
        """
        rows = check_rows(env_indices, self.num_envs).tolist()
        if len(values) != len(rows):
            raise ValueError(f"expected {len(rows)} values; got {len(values)}")
        self._access(rows, "set", name, dict(zip(rows, values, strict=True)))

    def render(self, env_index: int | RowIndices = None) -> Any:
        """Return the rendering of one env, or a list of several, by default of all.

        See the envs' `render_mode`.
        """
        if isinstance(env_index, int | np.integer):
            return self.call(int(env_index), "render")
        return self.call_each("render", env_indices=env_index)

    def _access(
        self,
        env_indices: RowIndices,
        kind: CallKind,
        name: str,
        arguments: Sequence[Any] | Mapping[int, Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        self._begin()
        rows = check_rows(env_indices, self.num_envs).tolist()
        if name.startswith("_"):
            raise CallError(f"expected the name of a public attribute; got {name!r}")

        def pack(some: Sequence[int]) -> bytes:
            own = [arguments[row] for row in some] if kind == "set" else arguments
            try:
                return codec.encode([list(own), named or {}])
            except codec.CodecError as error:
                raise CallError(
                    f"Env {some[0]}: {name}: {error}", env_index=some[0]
                ) from None

        found: dict[int, Any] = {}
        of_all = pack(rows) if kind != "set" else b""
        while missing := sorted({*rows} - found.keys()):
            calls, listed = {}, []
            for block, group in groupby(missing, self._group.blocks.block_of):
                some = [*group]
                packed = of_all or pack(some)
                while kind == "set" and len(some) > 1 and len(packed) > _MAX_SET_BYTES:
                    some = some[: len(some) // 2]
                    packed = pack(some)
                here = tuple([row - block.offset for row in some])
                calls[block.position] = Call(block.lane_block, here, kind, name, packed)
                listed.append((block, some))
            for (block, some), outcome in zip(
                listed, self._group.call(calls), strict=True
            ):
                faults = {f.env_index + block.offset: f for f in outcome.faults}
                failed = next((row for row in some if row in faults), None)
                if failed is not None:
                    fault = faults[failed]
                    raise CallError(
                        f"Env {failed} ({block.lane.name}): {name}: {fault.cause}",
                        env_index=failed,
                        remote_traceback=fault.detail,
                    )
                found.update(zip(some, _values_of(outcome.result), strict=False))
        return [found[row] for row in rows]

    # The batch as a whole.

    def stats(self) -> BatchStats:
        """Return counts of steps and faults, and latencies."""
        return self._recorder.stats(self.lanes)

    def close(self) -> None:
        """End all envs, within 2 seconds even if one hangs; may be called twice."""
        if self._is_closed:
            return
        with contextlib.ExitStack() as stack:
            for lane in self.lanes:
                stack.callback(lane.close)
            for lane in self.lanes:
                lane.begin_close()
            self._group.queue.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = ", ".join(f"{lane.num_envs} {lane.name}" for lane in self.lanes)
        state = "closed" if self._is_closed else "open"
        return (
            f"<BatchEnv {self.spec.env_name}, {self.num_envs} envs: {parts}; {state}>"
        )

    def _begin(self, *, needs_reset: bool = False) -> None:
        """Check that the batch can be used; recover from an interrupted call."""
        if self._is_closed:
            raise EnvsClosed(f"{self.spec.env_name}: closed, and can no longer be used")
        self._group.recover()
        if self._resetting is not None:
            raise LocalProtocolError("the envs are being reset; recv_reset() first")
        if needs_reset and not self._has_reset:
            raise ResetFirst("expected reset() of all envs before the first step")

    def _check_out(self) -> None:
        if self._is_encoded:
            raise ValueError(
                "out: expected None where observations hold texts, sequences, graphs "
                "or choices; there is no array to write them to"
            )

    def _check_not_ended(self, row_set: RowSet) -> None:
        ended = row_set.env_indices[self._ended[row_set.env_indices]]
        if ended.size:
            raise LocalProtocolError(
                f"the episodes of envs {ended.tolist()} have ended; "
                f"{self.reset_call} them before the next step"
            )

    def _result(
        self, row_set: RowSet, out: StepResult | None
    ) -> tuple[StepResult, tuple[int, EnvserveError] | None]:
        """Copy the lanes' rows, and mark absent and late ones.

        Returns:
          The result, and the first error to raise with the position of its block.
        """
        infos: dict[int, Mapping[str, Any]] = {}
        first_error = None
        outcomes = self._group.queue.outcomes
        for block in row_set.blocks:
            outcome = outcomes.get(block.position)  # a block of padding has none
            if outcome is not None and (
                outcome.infos or outcome.faults or outcome.error
            ):
                error = add_infos(infos, outcome, block, self._raises_faults)
                if error is not None and first_error is None:
                    first_error = (block.position, error)
        result = gather_result(self.spec, row_set, infos, out)
        absence = self._group.absence
        if absence.padded or absence.awaited_late_steps:
            absence.show(self.spec, row_set, result)
        if self._is_encoded:
            result = decode_result(self.spec, result, row_set.env_indices)
        if self.autoreset == "disabled":
            self._ended[row_set.env_indices] = result.terminated | result.truncated
        if first_error is None:
            recorder = self._recorder
            recorder.steps += 1
            recorder.rows += len(result.valid)
            if not _all(result.valid):
                recorder.count_invalid(result.valid, result.status)
        return result, first_error


def _common_spec(lanes: Sequence[Lane]) -> EnvSpec:
    """Return the spec of all lanes; raise SpaceError if they differ."""
    first = lanes[0]
    for lane in lanes[1:]:
        different = first.spec.differences(lane.spec)
        if different:
            raise SpaceError(
                f"{lane.name} has other spaces than {first.name}: "
                f"{'; '.join(different)}; give all of them the same env version"
            )
    return first.spec


def _joined(parts: Sequence[Sequence[Array]]) -> list[Array]:
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def _values_of(result: bytes) -> list[Any]:
    most = 2 * MAX_RESULT_VALUES
    values = codec.decode(result, max_bytes=len(result), max_values=most)
    if not isinstance(values, list) or not values:
        raise RemoteProtocolError("expected a value for at least one env; got none")
    return values
