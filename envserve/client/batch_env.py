"""Many envs as one: actions in, arrays `[num_envs, ...]` out.

Rows come from any mix of lanes (worker processes here, servers elsewhere) and are
the same wherever they run. A call that is cut short never leaks its result into the
next one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Self, get_args

import numpy as np
from gymnasium.spaces import Space

from envserve import codec
from envserve.actions import check_actions
from envserve.client.batch_stats import BatchStats, StepRecorder
from envserve.client.lane_group import Gathered, LaneGroup
from envserve.client.local_lane import LocalLane
from envserve.client.remote_lane import RemoteLane
from envserve.client.row_set import RowSet, RowSets, check_rows
from envserve.client.step_result import StepResult, gather_result, write_result
from envserve.cores import num_cores
from envserve.errors import (
    CallError,
    EnvError,
    EnvTimeout,
    LocalProtocolError,
    SpaceError,
)
from envserve.lane import (
    Autoreset,
    Call,
    Fault,
    Infos,
    Lane,
    PoolConfig,
)
from envserve.seeding import draw_root_seed
from envserve.slab import Status
from envserve.spec import EnvSpec, unflatten
from envserve.wrappers import check_wrappers, parse_wrappers

__all__ = ["BatchEnv", "BatchStats", "StepResult"]

Array = np.ndarray[Any, Any]
OnFault = Literal["truncate", "raise"]
OnServerLost = Literal["raise", "pad"]


class BatchEnv:
    """A batch of equal envs.

    Build it with `BatchEnv.local` or `BatchEnv.connect`; or from lanes of your own.
    Use it from one thread at a time, and close it, best by `with`.

    Attributes:
      spec: Name and spaces of the envs.
      num_envs: Number of rows.
      lanes: Where the rows come from, in row order.
      blocks: For each block its rows, int64 `[n]`. A block's envs are stepped
        together, by one worker; it is the least that can be sent and received.
      splits: For each group of blocks its rows, int64 `[n]`; there are `num_splits`,
        or fewer where there are too few rows.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        autoreset: Autoreset = "same_step",
        on_fault: OnFault = "truncate",
    ) -> None:
        """Puts lanes together.

        Args:
          lanes: Lanes that are ready. The batch owns them from now on.
          autoreset: The mode that the lanes were built with.
          on_fault: "truncate" ends a failed env's episode with an invalid row;
            "raise" raises EnvError besides. A value that breaks the env's own spaces
            always raises.

        Raises:
          SpaceError: A lane's spaces differ from the first one's.
        """
        self.lanes = tuple(lanes)
        self.spec: EnvSpec = self.lanes[0].spec
        for lane in self.lanes[1:]:
            different = self.spec.differences(lane.spec)
            if different:
                raise SpaceError(
                    f"{lane.name} has other spaces than {self.lanes[0].name}: "
                    f"{'; '.join(different)}; give all of them the same env version"
                )
        self._group = LaneGroup(self.lanes)
        self.num_envs = self._group.num_envs
        self._autoreset = autoreset
        self._on_fault = on_fault
        self.blocks: tuple[Array, ...] = tuple(
            RowSet([block]).env_indices for block in self._group.blocks
        )
        self.splits: tuple[Array, ...] = tuple(
            RowSet([b for b in self._group.blocks if b.split == split]).env_indices
            for split in sorted({b.split for b in self._group.blocks})
        )
        self._row_sets = RowSets(self._group.blocks)
        self._has_reset = False
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._recorder = StepRecorder()
        self._is_closed = False

    @classmethod
    def local(
        cls,
        env_name: str,
        num_envs: int,
        num_workers: int | None = None,
        *,
        seed: int | None = None,
        num_splits: int = 1,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Mapping[str, Any]] = (),
        import_modules: Sequence[str] = (),
        autoreset: Autoreset = "same_step",
        infos: Infos = "episode_end",
        spare_envs: bool = False,
        on_fault: OnFault = "truncate",
        step_timeout: float = 30.0,
        reset_timeout: float = 120.0,
        padding_after: float = 0.1,
        max_restarts: int = 5,
        crash_dir: str | None = "",
        start_timeout: float = 300.0,
    ) -> Self:
        """Starts envs in worker processes of this host.

        Args:
          env_name: Registered name, like "HalfCheetah-v5".
          num_envs: Number of rows.
          num_workers: Processes to spread them over; by default one per core.
          seed: Root seed in [0, 2**63), from which every env's seed follows; by
            default drawn anew.
          num_splits: Groups of blocks that can be stepped apart.
          env_kwargs: Arguments of `gymnasium.make`, plain values.
          wrappers: What to wrap each env in, the innermost first: mappings with a name
            and arguments, like `{"name": "ActionRepeat", "amount": 4}`; see
            docs/wrappers.md.
          import_modules: Modules that register own envs, or wrappers, when they are
            imported.
          autoreset: When an ended episode's env is reset, as in Gymnasium.
          infos: Which info dicts to report.
          spare_envs: Gives each row a second env, which a thread resets while the first
            is stepped, so that no step waits for a slow reset. Twice the memory, and
            other episodes than without; see docs/spare-envs.md.
          on_fault: What a failed env does besides giving an invalid row.
          step_timeout: Seconds that one env's step may take.
          reset_timeout: Seconds that one env's reset or construction may take.
          padding_after: Seconds that a step waits for envs whose worker is being
            replaced. Then their rows come back with status PENDING, and the others go
            on; `math.inf` waits for as long as it takes.
          max_restarts: How often a worker that ends without a step in between is
            replaced, before its envs are given up with EnvStartError.
          crash_dir: Folder for repro files of crashes; "" is one of this user's under
            the system's folder for temporary files, and None none at all.
          start_timeout: Seconds until all envs must be built.

        Raises:
          EnvStartError: The envs cannot be built; has the worker's traceback.
          WrapperError: A wrapper is not known, or an argument of it is wrong.
        """
        specs = parse_wrappers(wrappers)
        if not import_modules:  # nobody else knows more of them
            check_wrappers(specs)
        config = PoolConfig(
            env_name=env_name,
            num_envs=num_envs,
            num_workers=num_cores() if num_workers is None else num_workers,
            num_splits=num_splits,
            seed=draw_root_seed() if seed is None else seed,
            env_kwargs=dict(env_kwargs or {}),
            wrappers=specs,
            import_modules=tuple(import_modules),
            autoreset=autoreset,
            infos=infos,
            spare_envs=spare_envs,
            step_timeout_seconds=step_timeout,
            reset_timeout_seconds=reset_timeout,
            padding_after_seconds=padding_after,
            max_restarts=max_restarts,
            crash_dir=crash_dir,
        )
        lane = LocalLane(config)
        return cls._start([lane], start_timeout, autoreset, on_fault)

    @classmethod
    def connect(
        cls,
        env_name: str,
        addresses: Sequence[str],
        num_envs: int,
        *,
        seed: int | None = None,
        num_splits: int = 1,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Mapping[str, Any]] = (),
        autoreset: Autoreset = "same_step",
        infos: Infos = "episode_end",
        spare_envs: bool = False,
        on_fault: OnFault = "truncate",
        connect_timeout: float = 10.0,
        start_timeout: float = 300.0,
        server_lost_after: float = 60.0,
        on_server_lost: OnServerLost = "raise",
    ) -> Self:
        """Takes envs of servers, spread evenly over them.

        Args:
          env_name: Name of an env that every server offers.
          addresses: Servers, like "tcp://sim1:5555" or "ipc:///tmp/envs".
          num_envs: Number of rows in all.
          seed: As for `local`; the same seed gives the same rows.
          num_splits: As for `local`.
          env_kwargs: As for `local`; servers take only names that they allow.
          wrappers: As for `local`; own ones must be known to the servers.
          autoreset: As for `local`.
          infos: As for `local`.
          spare_envs: As for `local`; they count as envs of the server.
          on_fault: As for `local`.
          connect_timeout: Seconds within which a server must answer at all.
          start_timeout: Seconds until all envs must be built.
          server_lost_after: Seconds to wait for a server that is silent, or was
            restarted and is not back. Meanwhile its rows are padding, and it is
            attached to anew by itself, which costs an episode of each row.
          on_server_lost: What follows: "raise" raises ServerLost; "pad" goes on with
            padding, for ever or until the server is back. The batch does not shrink,
            since graphs are compiled for its shape; rows that are padding cost next to
            nothing. If no row of the batch is alive, ServerLost is raised all the same.

        Raises:
          ConnectError: No server answers at an address.
          EnvsBusy: A server has not enough free envs.
          UnknownEnv: A server does not offer the env.
          WrapperError: A server does not know a wrapper, or an argument is wrong.
        """
        specs = parse_wrappers(wrappers)
        if isinstance(addresses, str):
            raise TypeError(f"expected a list of addresses; got {addresses!r}")
        if not addresses or num_envs < len(addresses):
            raise ValueError(
                f"expected at least one server, and an env for each; got "
                f"{len(addresses)} servers and num_envs={num_envs}"
            )
        if on_server_lost not in get_args(OnServerLost):
            raise ValueError(
                f"on_server_lost: expected one of {get_args(OnServerLost)}; got "
                f"{on_server_lost!r}"
            )
        root_seed = draw_root_seed() if seed is None else seed
        edges = [i * num_envs // len(addresses) for i in range(len(addresses) + 1)]
        lanes: list[RemoteLane] = []
        try:
            for address, start, stop in zip(addresses, edges, edges[1:], strict=False):
                config = PoolConfig(
                    env_name=env_name,
                    num_envs=stop - start,
                    num_workers=1,  # the server's to choose
                    num_splits=num_splits,
                    seed=root_seed,
                    first_env_index=start,
                    env_kwargs=dict(env_kwargs or {}),
                    wrappers=specs,
                    autoreset=autoreset,
                    infos=infos,
                    spare_envs=spare_envs,
                )
                lanes.append(
                    RemoteLane(
                        address,
                        config,
                        connect_timeout_seconds=connect_timeout,
                        server_lost_after_seconds=server_lost_after,
                        pads_when_lost=on_server_lost == "pad",
                    )
                )
        except BaseException:
            for lane in lanes:
                lane.close()
            raise
        return cls._start(lanes, start_timeout, autoreset, on_fault)

    @classmethod
    def _start(
        cls,
        lanes: Sequence[LocalLane | RemoteLane],
        start_timeout: float,
        autoreset: Autoreset,
        on_fault: OnFault,
    ) -> Self:
        """Waits for lanes that start side by side."""
        deadline = time.monotonic() + start_timeout
        try:
            for lane in lanes:
                lane.finish_start(deadline)
            return cls(lanes, autoreset=autoreset, on_fault=on_fault)
        except BaseException:
            for lane in lanes:
                lane.close()
            raise

    @property
    def observation_space(self) -> Space[Any]:
        """Space of one env's observation."""
        return self.spec.observation_space

    @property
    def action_space(self) -> Space[Any]:
        """Space of one env's action."""
        return self.spec.action_space

    def reset(
        self,
        env_indices: Sequence[int] | Array | None = None,
        seeds: Sequence[int] | None = None,
    ) -> Any:
        """Resets envs and returns their first observations.

        Args:
          env_indices: Rows to reset; None for all.
          seeds: A seed per reset row. By default an env's first reset uses the seed
            that follows from the root seed, and later ones go on with the env's own
            random numbers.

        Returns:
          Observations `[len(env_indices), ...]`, in the order of `env_indices`.
        """
        indices = check_rows(env_indices, self.num_envs)
        if seeds is not None and len(seeds) != len(indices):
            raise ValueError(f"expected {len(indices)} seeds; got {len(seeds)}")
        self._check_open()
        self._group.reset(indices, None if seeds is None else [int(s) for s in seeds])
        self._has_reset |= env_indices is None
        self._ended[indices] = False
        leaves = [
            np.concatenate(parts)[indices]
            for parts in zip(
                *(lane.rows.observation for lane in self.lanes), strict=True
            )
        ]
        return unflatten(self.spec.observation_space, leaves)

    def step(self, actions: Any, out: StepResult | None = None) -> StepResult:
        """Steps all envs.

        Args:
          actions: Arrays `[num_envs, ...]`, nested as the action space.
          out: Arrays to write to instead of new ones; its infos are ignored.

        Raises:
          ActionError: The actions do not fit the action space; nothing was stepped.
          EnvError: An env broke its own spaces, or failed while `on_fault="raise"`.
          ServerError: A server was lost.
        """
        self._check_can_step()
        if self._group.out:
            raise LocalProtocolError(
                f"expected all rows to be in; {self.num_out} of them are out, see "
                "send(); recv() them first"
            )
        everything = self._group.everything
        began_at = time.perf_counter()
        arrays = check_actions(self.spec, actions, None, self.num_envs)
        self._check_not_ended(everything)
        gathered = self._group.step(arrays)
        result = self._result(everything, gathered, out)
        self._recorder.time(time.perf_counter() - began_at)
        error = self._error_of(gathered.faults)
        if error is not None:
            raise error
        return result

    def send(
        self,
        actions: Any,
        env_indices: Sequence[int] | Array | None = None,
        *,
        together: bool = False,
    ) -> None:
        """Starts a step of some envs, and does not wait for it.

        A call that is interrupted counts as sent: `recv` gives the results, or says
        that they are lost.

        Args:
          actions: Arrays `[n, ...]`, nested as the action space.
          env_indices: The rows that the actions are for, in any order; whole blocks
            (see `blocks`, `splits`). None for all.
          together: Have each server answer when all of its rows are done: fewer
            messages, for those who will wait for all of them. By default each block is
            answered when it is done, so that a slow env holds up its own block only.

        Raises:
          ActionError: The actions do not fit the action space; nothing was sent.
          IndexError: The rows are not whole blocks.
          LocalProtocolError: Some of the rows are out already.
          ServerError: A server was lost.
        """
        self._check_can_step()
        row_set, order = self._row_sets.of_rows(env_indices)
        arrays = check_actions(self.spec, actions, env_indices, len(row_set))
        self._check_not_ended(row_set)
        if order is not None:
            arrays = [array[order] for array in arrays]
        self._group.send(row_set, arrays, together)

    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        *,
        env_indices: Sequence[int] | Array | None = None,
        out: StepResult | None = None,
    ) -> tuple[Array, StepResult]:
        """Waits for envs that were sent, and returns those that have finished.

        Args:
          min_envs: Rows to wait for at least; all that have finished by then are
            returned. By default whatever block is first, or, with `env_indices`, all
            of these.
          timeout: Seconds to wait; by default as long as it takes. Workers and servers
            have limits of their own.
          env_indices: Wait for these rows only, whole blocks that are out.
          out: Arrays of exactly as many rows to write to instead of new ones; only
            with `env_indices` and without `min_envs`.

        Returns:
          Rows (int64 `[n]`, ascending, in whatever order they were sent), and their
          step, whose infos are by row of the batch. They can be sent again.

        Raises:
          EnvTimeout: Fewer have finished; the next call gets them.
          EnvError: As for `step`; the rows of that env's block are received, all
            others are not.
          LocalProtocolError: Fewer rows are out; or an interrupted call has cost the
            results of rows, which are out no more.
          ServerError: A server was lost, and with it the rows that it had.
          ValueError: `out` has other shapes; the rows stay out.
        """
        self._check_open()
        if out is not None and (env_indices is None or min_envs is not None):
            raise ValueError(
                "out: expected env_indices and no min_envs with it; else the number "
                "of rows is not known before"
            )
        positions, num_rows = self._expected(min_envs, env_indices)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        ready = self._group.wait(positions, num_rows, deadline)
        row_set = self._row_sets.of_blocks(ready)
        if len(row_set) < num_rows:
            raise EnvTimeout(
                f"expected {num_rows} rows within {timeout} s; {len(row_set)} have "
                "finished; nothing is lost, the next recv() gets them"
            )
        finished = self._group.finished(ready)
        gathered = Gathered()
        for block, item in zip(row_set.blocks, finished, strict=True):
            gathered.add(item, block.offset)
            error = item.error or self._error_of(gathered.faults)
            if error is not None:
                self._group.release([block.position])
                raise error
        try:
            result = self._result(row_set, gathered, out)
            self._group.release(ready)
            return row_set.env_indices, result
        except BaseException:  # Ctrl-C, or a wrong `out`: the rows stay out
            self._group.take_back(ready, finished)
            raise

    def call(self, env_index: int, name: str, *arguments: Any) -> Any:
        """Calls a method of one env, or reads an attribute that is not callable.

        Args:
          env_index: Row of the env.
          name: Name of the attribute; servers allow only those they expose.
          arguments: Plain values: numbers, strings, bytes, lists, dicts, arrays.

        Raises:
          CallError: With the traceback from the worker, if the method raised.
        """
        return self._call(env_index, "call", name, arguments)

    def get_attr(self, name: str) -> list[Any]:
        """Returns an attribute of every env, in row order."""
        return [self._call(row, "get", name, ()) for row in range(self.num_envs)]

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of every env to its own value."""
        if len(values) != self.num_envs:
            raise ValueError(f"expected {self.num_envs} values; got {len(values)}")
        for row, value in enumerate(values):
            self._call(row, "set", name, (value,))

    def render(self, env_index: int) -> Any:
        """Returns what one env renders; see the env's `render_mode`."""
        return self.call(env_index, "render")

    def stats(self) -> BatchStats:
        """Returns what the batch has been through: faults by kind, latencies."""
        return self._recorder.stats(self.lanes)

    def close(self) -> None:
        """Ends all envs, within 2 seconds even if one hangs; may be called twice."""
        if self._is_closed:
            return
        with contextlib.ExitStack() as stack:
            for lane in self.lanes:
                stack.callback(lane.close)
            for lane in self.lanes:
                lane.begin_close()
            self._group.close()
        self._is_closed = True

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the batch."""
        self.close()

    def __repr__(self) -> str:
        """Returns the env, and how many rows come from where."""
        parts = ", ".join(f"{lane.num_envs} {lane.name}" for lane in self.lanes)
        state = "closed" if self._is_closed else "open"
        return (
            f"<BatchEnv {self.spec.env_name}, {self.num_envs} envs: {parts}; {state}>"
        )

    @property
    def num_out(self) -> int:
        """How many rows have been sent and not received."""
        return self._group.num_rows(self._group.out)

    def _check_open(self) -> None:
        if self._is_closed:
            raise LocalProtocolError(f"{self!r} can no longer be used")

    def _check_can_step(self) -> None:
        self._check_open()
        if not self._has_reset:
            raise LocalProtocolError(
                "expected reset() of all envs before the first step"
            )

    def _check_not_ended(self, row_set: RowSet) -> None:
        if self._autoreset == "disabled" and self._ended[row_set.env_indices].any():
            ended = row_set.env_indices[self._ended[row_set.env_indices]]
            raise LocalProtocolError(
                f"the episodes of envs {ended.tolist()} have ended; "
                "reset(env_indices=...) them before the next step"
            )

    def _expected(
        self, min_envs: int | None, env_indices: Sequence[int] | Array | None
    ) -> tuple[Collection[int], int]:
        """Returns what `recv` looks at: blocks, and how many of their rows."""
        out = self._group.out
        positions: Collection[int] = out
        num_out = self.num_out
        if env_indices is not None:
            row_set, _ = self._row_sets.of_rows(env_indices)
            missing = [b for b in row_set.blocks if b.position not in out]
            if missing:
                rows = [row for b in missing for row in range(b.start, b.stop)]
                raise LocalProtocolError(
                    f"expected rows that are out; the rows {rows} are not; send() them "
                    "first"
                )
            num_out = len(row_set)
            positions = row_set.positions
            min_envs = num_out if min_envs is None else min_envs
        if not num_out:
            raise LocalProtocolError("no rows are out; send() some first")
        num_rows = 1 if min_envs is None else min_envs
        if not 1 <= num_rows <= num_out:
            raise LocalProtocolError(
                f"min_envs: expected 1 to {num_out}, the rows that are out; "
                f"got {num_rows}"
            )
        return positions, num_rows

    def _result(
        self, row_set: RowSet, gathered: Gathered, out: StepResult | None
    ) -> StepResult:
        """Copies what is in the lanes' rows."""
        if out is None:
            out = gather_result(self.spec, row_set, gathered.infos)
        else:
            write_result(self.spec, row_set, out)
            if out.infos or gathered.infos:
                out = out._replace(infos=gathered.infos)
        self._recorder.count(out.valid, out.status)
        if self._autoreset == "disabled":
            self._ended[row_set.env_indices] = out.terminated | out.truncated
        return out

    def _error_of(self, faults: Mapping[int, Fault]) -> EnvError | None:
        """Returns the error to raise for the first fault that asks for one."""
        for env_index, fault in sorted(faults.items()):
            if fault.is_violation or self._on_fault == "raise":
                where = self._group.block_of(env_index).lane.name
                if fault.status == Status.ENV_ERROR:  # a traceback, its cause last
                    above, _, cause = fault.text.strip().rpartition("\n")
                    detail = fault.text if above else ""
                else:  # the cause first, then a stack or what stderr ends with
                    cause, _, detail = fault.text.strip().partition("\n")
                return EnvError(
                    f"Env {env_index} ({where}): {cause}",
                    env_index=env_index,
                    remote_traceback=detail,
                )
        return None

    def _call(
        self,
        env_index: int,
        kind: Literal["call", "get", "set"],
        name: str,
        arguments: tuple[Any, ...],
    ) -> Any:
        self._check_open()
        check_rows([env_index], self.num_envs)
        if name.startswith("_"):
            raise CallError(f"expected the name of a public attribute; got {name!r}")
        result = self._group.call(Call(env_index, kind, name, arguments))
        answer = codec.decode(result, max_bytes=len(result))
        if "error" in answer:
            where = self._group.block_of(env_index).lane.name
            raise CallError(
                f"Env {env_index} ({where}): {name}: {answer['error']}",
                env_index=env_index,
                remote_traceback=answer["traceback"],
            )
        return answer["value"]
