"""A block of single envs, which are stepped sequentially.

If an env raises an exception or returns a value outside its spaces, the block rebuilds
the env within the same operation, and reports a fault for the row. If the new env
cannot be built or reset, the exception ends the worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from envserve.crashes.action_ring import ActionRing
from envserve.lane import Fault
from envserve.slab import Rows, Status, next_beat
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.infos import copy_info
from envserve.spaces.leaves import is_finite
from envserve.spaces.variable_length import decode_actions
from envserve.worker import step_timings
from envserve.worker.attribute_calls import CallRequest, run_call
from envserve.worker.channel import BuildMessage
from envserve.worker.env_checks import EnvChecks, SpaceViolation
from envserve.worker.env_row import NO_OPTIONS, EnvRow
from envserve.worker.spare_row import ResetThreads, SpareRow
from envserve.worker.worker_report import encode_report, fault_from_error


class EnvBlock:
    """The envs of a block: one per row, or two per row with spare envs.

    Attributes:
      rows: Indices of the block's rows in the pool.
    """

    def __init__(
        self,
        config: BuildMessage,
        rows: range,
        checks: EnvChecks,
        threads: ResetThreads | None,
    ) -> None:
        """Store the arguments; `build` builds the envs.

        Without spare envs, `threads` is None.
        """
        self.rows = rows
        self._config = config
        self._checks = checks
        self._encode_report = partial(encode_report, len(rows), config.max_infos_kib)
        self._reports_all_infos = config.infos == "all"
        self._reports_end_infos = config.infos == "episode_end"
        self._envs: list[EnvRow | SpareRow] = []
        for row in rows:
            context = config.context_of(row, config.worker, config.num_workers)
            arguments = config, row, config.incarnations[row], checks, context
            env = EnvRow(*arguments, config.code.copy_env_fn(row))
            if threads:
                spare = EnvRow(*arguments, config.code.copy_env_fn(row))
            self._envs.append(SpareRow(env, spare, threads) if threads else env)

    def build(self) -> Iterator[tuple[int, EnvSpec]]:
        """Build the envs; yield each env's row in the whole batch, and its spec."""
        for env in self._envs:
            self._spec = env.build()
            yield env.env_index, self._spec
        for env in self._envs:
            if isinstance(env, SpareRow):
                yield env.env_index, env.build_spare()

    def attach(self, rows: Rows, heartbeat: memoryview, ring: ActionRing) -> None:
        """Set the arrays, the heartbeat and the action ring to write to."""
        start, stop = self.rows.start, self.rows.stop
        self._all_rows = rows
        self._block = rows.at(slice(start, stop))
        self._heartbeat = heartbeat
        self._record_step = ring.step_recorder(rows.action, start, stop)
        for env in self._envs:
            env.attach(rows, heartbeat, ring.row_record(env.row))

    def step(self) -> bytes:
        """Step all envs with the actions in the slab; return the encoded report."""
        began_at = step_timings.start_time(self._heartbeat)
        block, start = self._block, self.rows.start
        reports_all, reports_ends = self._reports_all_infos, self._reports_end_infos
        rewards: list[float] = []
        ended: list[tuple[int, bool, bool]] = []
        faults: list[Fault] = []
        infos: dict[int, Mapping[str, Any]] = {}
        self._record_step()
        block.flags[...] = 0  # no episode has ended yet, and all statuses are OK
        actions = decode_actions(self._spec, block.action)
        for env, action in zip(self._envs, actions, strict=True):
            try:
                reward, terminated, truncated, info = env.step(action)
            except Exception as error:
                faults.append(self._replace_failed(env, error, in_step=True))
                rewards.append(0.0)
                continue
            rewards.append(reward)
            is_end = terminated or truncated
            if is_end:
                ended.append((env.row - start, terminated, truncated))
            # Mappings of other types may have no truth value, but a copy has one.
            if (reports_all or (reports_ends and is_end)) and (
                (type(info) is not dict or info) and (copied := copy_info(info))
            ):
                infos[env.row] = copied
        block.reward[...] = rewards
        for position, terminated, truncated in ended:
            block.terminated[position] = terminated
            block.truncated[position] = truncated
        # If a sum is finite, so are its terms. A sum of finite terms may overflow, so
        # `_replace_non_finite` checks each term if a sum is not finite.
        if self._checks.nonfinite != "pass" and not (
            math.isfinite(sum(rewards)) and all(map(is_finite, block.observation))
        ):
            faults += self._replace_non_finite(rewards)
        for fault in faults:
            infos.pop(fault.env_index, None)
        step_timings.record_step(self._heartbeat, began_at, len(rewards))
        if not (faults or infos or self._checks.warnings):  # the usual case
            return b""
        return self._encode_report(faults, infos, self._checks.take_warnings())

    def _replace_non_finite(self, rewards: list[float]) -> list[Fault]:
        faults = []
        for env, reward in zip(self._envs, rewards, strict=True):
            try:
                env.check_finite(reward)
            except SpaceViolation as error:
                faults.append(self._replace_failed(env, error, in_step=True))
        return faults

    def _replace_failed(
        self, env: EnvRow | SpareRow, error: Exception, *, in_step: bool = False
    ) -> Fault:
        """Rebuild a failed env and reset it; return the fault of its row.

        With autoreset "next_step", an env that failed in a step is reset by the next
        step instead.

        The status of the row is PENDING until the pool writes the lost transition. If
        this worker dies before it has sent its report, PENDING shows the pool that
        `final_observation` of the row is already final, and that `observation` belongs
        to the next episode.
        """
        fault = fault_from_error(env.row, error)
        rows = self._all_rows
        for final, last in zip(rows.final_observation, rows.observation, strict=True):
            final[env.row] = 0 if isinstance(error, SpaceViolation) else last[env.row]
        rows.status[env.row] = Status.PENDING
        env.record.save_failed_record()
        self._heartbeat[1] = 1
        env.rebuild()
        if in_step and self._config.autoreset == "next_step":
            self._heartbeat[1] = 0
            env.defer_reset()
            if isinstance(error, SpaceViolation):  # the row may contain NaN
                for last in rows.observation:
                    last[env.row] = 0
        else:
            env.reset(None)
        return fault

    def reset(self, payload: bytes) -> bytes:
        """Reset some or all rows; return the encoded report.

        An empty list of rows defers the reset of all rows to the next step.
        """
        request = codec.decode(payload) if payload else {}
        reset_rows = request.get("rows")
        if reset_rows is None:
            reset_rows = self.rows
        for env in () if reset_rows else self._envs:
            env.defer_reset()
        seeds, options = request.get("seeds"), request.get("options", b"")
        infos, rebuilt, faults = {}, [], list[Fault]()
        for position, row in enumerate(reset_rows):
            env = self._envs[row - self.rows.start]
            seed = None if seeds is None else seeds[position]
            if seeds is not None and seed is None:
                env.drop_initial_seed()
            incarnation = env.incarnation
            try:
                info = self._reset_or_rebuild(env, seed, options, faults)
            except Exception as error:
                if seed is None and options in NO_OPTIONS:
                    raise  # not even a plain reset succeeds, so restart the worker
                faults.append(self._replace_failed(env, error))
                info = {}
            # The pool counts one rebuild for each fault, so do not add that rebuild to
            # `rebuilt`.
            is_counted = bool(faults) and faults[-1].env_index == row
            rebuilt += [row] * (env.incarnation - incarnation - is_counted)
            if info and self._reports_all_infos:
                infos[row] = copy_info(info)
            self._all_rows.reward[row] = 0.0
            self._all_rows.flags[:, row] = 0  # no end of an episode, and status OK
        infos = dict(sorted(infos.items()))  # the rows may be listed in any order
        return self._encode_report(faults, infos, self._checks.take_warnings(), rebuilt)

    def _reset_or_rebuild(
        self,
        env: EnvRow | SpareRow,
        seed: int | None,
        options: bytes,
        faults: list[Fault],
    ) -> Mapping[str, Any]:
        """Reset an env and return its info; if this fails, rebuild the env and retry.

        If the retry succeeds, the failure is added to `faults`, with status OK. An env
        that has never been reset is not rebuilt.
        """
        was_fresh = env.is_fresh
        try:
            return env.reset(seed, options)
        except Exception as error:
            if was_fresh:
                raise
            first = fault_from_error(env.row, error)
        self._heartbeat[1] = 1  # use the reset timeout: building an env may take long
        env.rebuild()
        info = env.reset(seed, options)
        faults.append(first._replace(status=Status.OK))
        return info

    def call(self, payload: bytes) -> bytes:
        """Call, get or set an attribute of some envs; return the encoded reply."""
        request = CallRequest.decode(payload)

        def value_of(position: int) -> Any:
            env = self._envs[request.rows[position] - self.rows.start]
            self._heartbeat[0] = next_beat(self._heartbeat[0], env.row)
            self._heartbeat[1] = 1
            if request.may_change_env:
                env.record.mark_touched()
            return env.call(
                request.kind, request.name, *request.arguments_for(position)
            )

        reply = run_call(request, value_of)
        self._heartbeat[1] = 0
        return reply

    def render(self, row: int) -> Any:
        """Return the rendered frame of a row's env."""
        return self._envs[row - self.rows.start].render()

    def close(self) -> None:
        """Close all envs, even if closing some of them raises an exception."""
        for env in self._envs:
            env.close()
