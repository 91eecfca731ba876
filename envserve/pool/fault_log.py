"""What the host of an env gets to see of a fault: a line in the log, and a repro file.

The line names the env, its worker, the cause, and how to see it again.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from envserve.channel import Kind
from envserve.crash_files import CrashFiles
from envserve.journal import Played
from envserve.lane import Block, Fault, PoolConfig
from envserve.pool.launcher import one_line
from envserve.pool.operations import Operation
from envserve.pool.supervisor import SupervisedWorker
from envserve.repro import End, Repro, encode_repro
from envserve.seeding import env_seed
from envserve.slab import Slab, Status, row_of_beat

__all__ = ["FaultLog"]

_MAX_CAUSE: Final = 300  # characters of what is said on the line
_MAX_ACTION: Final = 80


class FaultLog:
    """Reports the faults of one pool."""

    def __init__(
        self, config: PoolConfig, logger: logging.Logger, label: str = ""
    ) -> None:
        """Takes the pool's settings, where lines go, and how they begin."""
        self._config = config
        self._logger = logger
        self._label = f"{label}: " if label else ""
        self._files = None
        if config.crash_dir is not None:
            folder = Path(config.crash_dir) if config.crash_dir else None
            self._files = CrashFiles(folder)
        self._last_detail = ""

    def env_failed(
        self,
        fault: Fault,
        block: Block,
        worker: SupervisedWorker,
        slab: Slab,
        now: float,
    ) -> None:
        """Reports an env that has raised, or broken its spaces, and was rebuilt."""
        row = fault.env_index
        played = self._read(slab, row, block, now, has_failed=True)
        detail, _, cause = fault.text.strip().rpartition("\n")
        end = End(status=fault.status, text=fault.text, is_violation=fault.is_violation)
        path = self._write(row, played, end, self._config.step_timeout_seconds, now)
        pid = None
        if worker.process is not None:
            worker.process.poll_exit()  # which hears of its start, too
            pid = worker.process.pid
        self._log(
            f"Env {self._index_of(row)} (worker {worker.index}, pid {pid}) failed and "
            f"was rebuilt: {_shortened(cause, _MAX_CAUSE)}",
            [*self._story(row, played), *self._recipe(path)],
            detail,
        )

    def worker_lost(
        self,
        worker: SupervisedWorker,
        status: Status,
        text: str,
        operations: Mapping[int, Operation],
        slab: Slab,
        now: float,
    ) -> None:
        """Reports a worker that has died, or was killed, and the env that it was in.

        What its envs had been through is forgotten then, for its successor's sake.
        """
        beats = slab.heartbeats[worker.index]
        row = row_of_beat(int(beats[0]))
        block = next(
            (b for b in worker.blocks if row is not None and b.start <= row < b.stop),
            None,
        )
        operation = None if block is None else operations.get(block.index)
        is_slow = bool(beats[1])
        is_call = operation is not None and operation.kind is Kind.CALL
        exit_ = worker.exit
        parts = []
        path = None
        if row is None or block is None or not (is_slow or operation is not None):
            parts.append("no env was at work")
        else:
            played = self._read(slab, row, block, now)
            doing = "a call of" if is_call else "a reset of" if is_slow else "a step of"
            parts += [f"in {doing} env {self._index_of(row)}"]
            parts += self._story(row, played)
            if not is_call:
                end = End(
                    status=status,
                    text=text,
                    exit_code=None if exit_ is None else exit_.exit_code,
                    stderr_tail="" if exit_ is None else exit_.stderr_tail,
                )
                seconds = (
                    self._config.reset_timeout_seconds
                    if is_slow
                    else self._config.step_timeout_seconds
                )
                path = self._write(row, played, end, seconds, now)
        self._forget(worker, slab)
        pid = None if exit_ is None else exit_.pid
        last = "" if exit_ is None else exit_.last_words
        if last:
            parts.append(f'its stderr ends with "{_shortened(last, _MAX_CAUSE)}"')
        cause, _, detail = text.partition("\n")
        if detail:  # a traceback
            cause += f" {detail.splitlines()[-1]}"
        self._log(
            f"{worker.label}, pid {pid}, {_shortened(cause, _MAX_CAUSE)}",
            [*parts, *self._recipe(path)],
            detail or ("" if exit_ is None else exit_.excerpt),
        )

    def _log(self, head: str, parts: list[str], detail: str) -> None:
        """Logs a line; below it what it is about, when that is not as the last time."""
        below = "" if detail == self._last_detail else f"\n{detail}".rstrip()
        self._last_detail = detail
        line = "; ".join([head, *parts])
        self._logger.warning("%s%s%s", self._label, line, below)

    def _index_of(self, row: int) -> int:
        return self._config.first_env_index + row

    def _read(
        self,
        slab: Slab,
        row: int,
        block: Block,
        now: float,
        *,
        has_failed: bool = False,
    ) -> Played | None:
        """Reads all that is needed for a file, or just enough for a line."""
        is_for_file = self._files is not None and self._files.has_room(now)
        return slab.journal.read(
            row,
            block.start,
            has_failed=has_failed,
            max_actions=None if is_for_file else 1,
        )

    def _story(self, row: int, played: Played | None) -> list[str]:
        if played is None:
            return ["it was never reset"]
        config, incarnation = self._config, played.incarnation
        seed = played.seed
        if seed is None:
            seed = env_seed(config.seed, self._index_of(row), incarnation)
        story = [
            f"incarnation {incarnation}",
            f"seed {seed}",
            f"step {played.episode_step} of its episode",
        ]
        if all(len(array) for array in played.actions):
            story.append(f"last action {_action_text(played)}")
        return story

    def _write(
        self,
        row: int,
        played: Played | None,
        end: End,
        timeout_seconds: float,
        now: float,
    ) -> Path | None:
        if self._files is None or played is None or not self._files.has_room(now):
            return None
        config = self._config
        repro = Repro(
            env_name=config.env_name,
            env_kwargs=dict(config.env_kwargs),
            wrappers=config.wrappers,
            import_modules=config.import_modules,
            autoreset=config.autoreset,
            root_seed=int(config.seed),
            env_index=int(self._index_of(row)),
            timeout_seconds=timeout_seconds,
            played=played,
            end=end,
        )
        name = f"{config.env_name}-env-{self._index_of(row)}-{end.status.name.lower()}"
        return self._files.write(name, encode_repro(repro), now)

    def _recipe(self, path: Path | None) -> list[str]:
        if path is None:
            return []
        imports = "".join(
            f" --import {shlex.quote(module)}" for module in self._config.import_modules
        )
        return [f"to see it again: envserve replay {shlex.quote(str(path))}{imports}"]

    def _forget(self, worker: SupervisedWorker, slab: Slab) -> None:
        slab.heartbeats[worker.index, :2] = 0
        for block in worker.blocks:
            for row in range(block.start, block.stop):
                slab.journal.row(row, block.start)


def _shortened(text: str, length: int) -> str:
    text = one_line(text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _action_text(played: Played) -> str:
    with np.printoptions(precision=4, threshold=8, edgeitems=3):
        values = [str(array[-1]) for array in played.actions]
    text = values[0] if len(values) == 1 else f"({', '.join(values)})"
    return _shortened(text, _MAX_ACTION)
