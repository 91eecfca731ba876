"""The child process: builds envs, steps blocks, writes rows.

It answers every operation on a block exactly once, with the block's rows written to
the slab before. It loads neither zmq nor asyncio.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import random
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, Final

import numpy as np

from envserve.crashes.action_ring import ActionRing
from envserve.errors import (
    EnvStartError,
    SpaceError,
    UnknownEnv,
    WorkerError,
    WrapperError,
)
from envserve.settings import num_cores
from envserve.slab import Slab, Status, next_beat
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import custom_space_classes
from envserve.spaces.variable_length import decode_actions
from envserve.worker import replay_worker, step_timings
from envserve.worker.attribute_calls import CallTask, answer_call
from envserve.worker.channel import Frame, Inbox, Kind, pack_frame
from envserve.worker.env_checks import Rules
from envserve.worker.env_row import EnvRow, SpaceViolation
from envserve.worker.orphans import Orphans
from envserve.worker.rendering import Camera
from envserve.worker.spare_row import SpareRow, reset_threads
from envserve.worker.vector_block import VectorBlock
from envserve.worker.worker_report import (
    encode_report,
    encode_spaces,
    fault_of,
    sendable,
)
from envserve.wrappers.specs import wrappers_from_plain

__all__ = ["run"]

_Row = EnvRow | SpareRow

_LOGGER: Final = logging.getLogger(__name__)
#: To wake a core that sleeps takes longer than a light env's step; a policy thinks for
#: about as long as this. Only where no other worker waits for that core.
_SPIN_SECONDS: Final = 400e-6
#: How long closing waits for resets that run; the pool's patience is twice that.
_CLOSE_SECONDS: Final = 0.5
_OK: Final = int(Status.OK)
_OURS: Final = (EnvStartError, SpaceError)


def run(channel: socket.socket, import_error: str = "") -> None:
    """Serves a pool until it says CLOSE or goes away.

    Args:
      channel: This side of the socket pair.
      import_error: Why the user's env modules could not be imported; else empty.
    """
    with channel:
        try:
            inbox = Inbox(channel)
            frames = inbox.frames()
            build = next(frames, None)
            if build is None or build.kind not in (Kind.BUILD, Kind.REPLAY):
                return
            if import_error:
                raise EnvStartError(import_error)
            if build.kind is Kind.REPLAY:
                replay_worker.run(channel, build.payload, build.sequence)
                return
            config = codec.decode(build.payload, max_bytes=1 << 26)
            if config["num_workers"] <= num_cores():
                inbox.spin_seconds = _SPIN_SECONDS
            worker = (_VectorWorker if config["vectorized"] else _Worker)(
                channel, config
            )
            orphans = Orphans()
            for frame in frames:
                orphans.reap()
                if frame.kind is Kind.SLAB:
                    worker.attach(inbox.fds.pop())
                elif frame.kind is Kind.CLOSE:
                    break
                else:
                    worker.handle(frame)
            worker.close()
        except (UnknownEnv, WrapperError) as error:
            is_env = isinstance(error, UnknownEnv)
            kind = Kind.UNKNOWN_ENV if is_env else Kind.BAD_WRAPPER
            refused = pack_frame(kind, payload=sendable(str(error)).encode())
            with contextlib.suppress(OSError):
                channel.sendall(refused)
        except Exception as error:
            # What we say ourselves is whole; of others, where it comes from counts.
            is_ours = isinstance(error, _OURS) and error.__cause__ is None
            is_lasting = isinstance(error, SpaceViolation) and error.is_lasting
            is_whole = is_ours or is_lasting
            text = sendable(str(error) if is_whole else traceback.format_exc())
            failed = pack_frame(Kind.FAILED, int(is_lasting), payload=text.encode())
            # A pool that is gone needs no report.
            with contextlib.suppress(OSError):
                channel.sendall(failed)


class _Worker:
    def __init__(self, channel: socket.socket, build: dict[str, Any]) -> None:
        self._send: Callable[[bytes], None] = channel.sendall
        self._build = build
        self._infos_of_all = build["infos"] == "all"
        self._infos_of_ends = build["infos"] == "episode_end"
        self._max_infos_kib = build["max_infos_kib"]
        self._checks_finite = build["nonfinite"] != "pass"
        self._rules = Rules(build["nonfinite"], build["strict_spaces"])
        self._incarnations = rows = dict(build["incarnations"])
        self._threads = reset_threads(len(rows)) if build["spare_envs"] else None
        self._blocks = {
            index: self._host(range(start, stop))
            for index, start, stop in build["blocks"]
        }
        self._envs = {env.row: env for envs in self._blocks.values() for env in envs}
        first, *others = self._envs.values()
        # Env code that uses the global generators must not do the same everywhere.
        random.seed(first.seed)
        np.random.seed(first.seed)
        self._spec = first.build()
        self._send(pack_frame(Kind.BUILT))
        for env in others:
            self._check_built(env, env.build())
        for env in self._envs.values():
            if isinstance(env, SpareRow):
                self._check_built(env, env.build_spare())
        if build["worker"] == 0:
            self._warn_of_own_spaces()
        gc.collect()
        gc.freeze()
        self._send(pack_frame(Kind.READY, payload=encode_spaces(self._spec)))

    def _warn_of_own_spaces(self) -> None:
        spec = self._spec
        own = custom_space_classes(spec.observation_space) | custom_space_classes(
            spec.action_space
        )
        for name, kind in own.items():
            _LOGGER.warning(
                "%s: a space of class %s is taken as a %s; what that class does in "
                "sample() and contains() is not known outside of the env",
                *(spec.env_name, name, kind),
            )

    def _host(self, rows: range) -> list[Any]:
        """Returns what plays the rows of a block; nothing is built yet."""
        return [self._make_row(row) for row in rows]

    def _make_row(self, row: int) -> _Row:
        build = self._build
        make = partial(
            EnvRow,
            row=row,
            env_index=build["first_env_index"] + row,
            incarnation=self._incarnations[row],
            name=build["env_name"],
            kwargs=build["env_kwargs"],
            root_seed=build["seed"],
            is_seeded=build["seeded"],
            wrappers=wrappers_from_plain(build["wrappers"]),
            rules=self._rules,
        )
        return make() if self._threads is None else SpareRow(make, self._threads)

    def _check_built(self, env: _Row, spec: EnvSpec) -> None:
        different = self._spec.differences(spec)
        if different:
            first = next(iter(self._envs.values()))
            raise EnvStartError(
                f"Env {env.env_index}: its spaces differ from those of env "
                f"{first.env_index}; {'; '.join(different)}"
            )
        self._send(pack_frame(Kind.BUILT))

    def attach(self, fd: int) -> None:
        """Maps the slab."""
        build = self._build
        self._slab = Slab(fd, self._spec, build["num_envs"], build["num_workers"])
        self._slab.close()  # mapped; a process that an env starts must not have it
        self._rows = self._slab.rows
        self._heartbeat = heartbeat = self._slab.heartbeats[build["worker"]].data
        self._ring = ActionRing(self._spec, build["num_envs"], self._slab.extra)
        self._camera = Camera(build, self._spec, self._blocks, self._slab, self._ring)
        for envs in self._blocks.values():
            self._attach(envs, heartbeat)
        self._float_observations = [
            array for array in self._rows.observation if array.dtype.kind == "f"
        ]

    def _attach(self, envs: list[_Row], heartbeat: memoryview) -> None:
        for env in envs:
            record = self._ring.row_record(env.row, envs[0].row)
            env.attach(self._rows, heartbeat, record, self._build["autoreset"])

    def handle(self, frame: Frame) -> None:
        """Carries out one operation on a block, and answers it."""
        envs = self._blocks[frame.block]
        if frame.kind is Kind.STEP:
            payload = self._step(envs)
        elif frame.kind is Kind.RESET:
            payload = self._reset(envs, frame.payload)
        elif frame.kind is Kind.CALL:
            payload = self._call(envs, frame.payload)
        else:
            raise WorkerError(f"expected an operation on a block; got {frame.kind!r}")
        self._send(pack_frame(Kind.DONE, frame.block, frame.sequence, payload))
        if self._camera.until[0]:
            self._camera.look()

    def close(self) -> None:
        """Closes the envs; one that fails to does not keep the others open."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            spares = [env for env in self._envs.values() if isinstance(env, SpareRow)]
            warming = [each.warming for each in spares if each.warming is not None]
            wait([each for each in warming if not each.cancelled()], _CLOSE_SECONDS)
        for env in self._envs.values():
            env.close()

    def _step(self, envs: list[_Row]) -> bytes:
        began_at = step_timings.begin(self._heartbeat)
        rows, start, stop = self._rows, envs[0].row, envs[-1].row + 1
        rewards: list[float] = []
        ended: list[tuple[int, bool, bool]] = []
        faults: list[dict[str, Any]] = []
        infos: dict[int, Mapping[str, Any]] = {}
        infos_of_all, infos_of_ends = self._infos_of_all, self._infos_of_ends
        self._ring.record_step(rows.action, start, stop)
        rows.status[start:stop] = _OK
        copies = [array[start:stop].copy() for array in rows.action]  # for envs to keep
        actions = decode_actions(self._spec, copies)
        for env, action in zip(envs, actions, strict=True):
            try:
                reward, terminated, truncated, info = env.step(action)
            except Exception as error:
                faults.append(self._recover(env, error))
                rewards.append(0.0)
                continue
            rewards.append(reward)
            if terminated or truncated:
                ended.append((env.row, terminated, truncated))
                if infos_of_ends and info:
                    infos[env.row] = info
            if infos_of_all and info:
                infos[env.row] = info
        rows.reward[start:stop] = rewards
        rows.terminated[start:stop] = rows.truncated[start:stop] = False
        for row, terminated, truncated in ended:
            rows.terminated[row] = terminated
            rows.truncated[row] = truncated
        if self._checks_finite and not self._is_finite(rewards, start, stop):
            faults += self._recover_non_finite(envs)
        for fault in faults:
            infos.pop(fault["row"], None)
        step_timings.note_step(self._heartbeat, began_at, stop - start)
        return self._report(faults, infos, (), stop - start)

    def _report(
        self,
        faults: list[dict[str, Any]],
        infos: dict[int, Mapping[str, Any]],
        rebuilt: Sequence[int],
        num_rows: int,
    ) -> bytes:
        most, notes = self._max_infos_kib, self._rules.take_notes()
        return encode_report(faults, infos, rebuilt, num_rows, most, notes)

    def _is_finite(self, rewards: list[float], start: int, stop: int) -> bool:
        """Looks at a whole block at once; which row it is matters only if not.

        A sum that is finite has finite terms only. One that overflows need not mean
        anything: then the rows are looked at one by one.
        """
        if not math.isfinite(sum(rewards)):
            return False
        with np.errstate(all="ignore"):
            sums = (array[start:stop].sum() for array in self._float_observations)
            return all(map(math.isfinite, sums))

    def _recover_non_finite(self, envs: list[_Row]) -> list[dict[str, Any]]:
        faults = []
        for env in envs:
            try:
                env.check_finite(self._rows.reward[env.row])
            except SpaceViolation as error:
                faults.append(self._recover(env, error))
        return faults

    def _recover(self, env: _Row, error: Exception) -> dict[str, Any]:
        """Replaces an env that failed; that this may fail too ends the worker.

        The pool makes a lost row of it. Until then it is PENDING, by which the pool
        knows, should this worker die before it answers, that the last observation of
        the row is the final one already.
        """
        fault = fault_of(env.row, error)
        for final, last in zip(
            self._rows.final_observation, self._rows.observation, strict=True
        ):
            final[env.row] = 0 if isinstance(error, SpaceViolation) else last[env.row]
        self._rows.status[env.row] = Status.PENDING
        env.record.save_failed()
        self._heartbeat[1] = 1
        env.rebuild()
        env.reset(None)
        return fault

    def _reset(self, envs: list[_Row], payload: bytes) -> bytes:
        request = codec.decode(payload) if payload else {}
        chosen = request.get("rows")
        seeds, options = request.get("seeds"), request.get("options", b"")
        if chosen is None:
            chosen = [env.row for env in envs]
        infos, rebuilt, faults = {}, [], []
        for position, row in enumerate(chosen):
            env = self._envs[row]
            seed = None if seeds is None else seeds[position]
            if seeds is not None and seed is None:
                env.forget_seed()
            incarnation = env.incarnation
            try:
                info = self._reset_or_rebuild(env, seed, options)
            except Exception as error:
                if seed is None and not options:
                    raise  # it cannot be reset at all
                faults.append(self._recover(env, error))
                incarnation, info = incarnation + 1, {}  # a fault tells of one
            rebuilt += [row] * (env.incarnation - incarnation)
            if info and self._infos_of_all:
                infos[row] = info
            rows = self._rows
            rows.reward[row] = 0.0
            rows.terminated[row] = rows.truncated[row] = False
            rows.status[row] = _OK
        return self._report(faults, infos, rebuilt, len(envs))

    def _reset_or_rebuild(
        self, env: _Row, seed: int | None, options: bytes
    ) -> Mapping[str, Any]:
        """Gives an env whose reset fails one new incarnation, unless it is new."""
        was_fresh = env.is_fresh
        try:
            return env.reset(seed, options)
        except Exception as error:
            if was_fresh:
                raise
            first = error
        env.rebuild()
        info = env.reset(seed, options)  # what this raises is told by who is told
        text = "Env %d: its reset failed; it was built anew"
        _LOGGER.warning(text, env.env_index, exc_info=first)
        return info

    def _call(self, _: list[_Row], payload: bytes) -> bytes:
        task = CallTask.read(payload)

        def value_of(position: int) -> Any:
            env = self._envs[task.rows[position]]
            self._heartbeat[0] = next_beat(self._heartbeat[0], env.row)
            self._heartbeat[1] = 1
            if task.changes_env:
                env.record.mark_touched()
            return env.call(task.kind, task.name, *task.given(position))

        answer = answer_call(task, value_of)
        self._heartbeat[1] = 0
        return answer


class _VectorWorker(_Worker):
    """Hosts blocks that are one vector env each."""

    def _host(self, rows: range) -> list[Any]:
        incarnation = self._incarnations[rows.start]
        return [VectorBlock(self._build, rows, self._rules, incarnation)]

    def _attach(self, envs: list[Any], heartbeat: memoryview) -> None:
        envs[0].attach(self._rows, heartbeat, self._ring)

    def _step(self, envs: list[Any]) -> bytes:
        return bytes(envs[0].step())

    def _reset(self, envs: list[Any], payload: bytes) -> bytes:
        return bytes(envs[0].reset(payload))

    def _call(self, envs: list[Any], payload: bytes) -> bytes:
        return bytes(envs[0].call(payload))
