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

from envserve.crashes.action_ring import ActionRing, Played
from envserve.crashes.files import CrashFiles
from envserve.crashes.repro import End, Repro, encode_repro
from envserve.lane import Fault
from envserve.pool.states import Exit, Lost
from envserve.pool.supervisor import SupervisedWorker
from envserve.seeding import env_seed
from envserve.settings import PoolSettings
from envserve.slab import Slab, row_of_beat
from envserve.spec import EnvSpec
from envserve.text import one_line, printable
from envserve.worker.channel import Kind

__all__ = ["FaultLog"]

_MAX_CAUSE: Final = 300  # characters of what is said on the line
_MAX_ACTION: Final = 80


class FaultLog:
    """Reports the faults of one pool."""

    def __init__(
        self,
        config: PoolSettings,
        logger: logging.Logger,
        label: str = "",
        owner: str = "",
    ) -> None:
        """Takes settings, where lines go, how they begin, and whose envs they are."""
        self._config = config
        self._logger = logger
        self._label = f"{label}: " if label else ""
        self._files = None
        if config.crash_dir is not None:
            folder = Path(config.crash_dir) if config.crash_dir else None
            self._files = CrashFiles(folder, owner)
        self._last_detail = ""

    def attach(self, slab: Slab, spec: EnvSpec) -> None:
        """Takes the memory in which workers note what their envs go through."""
        self._heartbeats = slab.heartbeats
        self._ring = ActionRing(spec, self._config.num_envs, slab.extra)

    def env_failed(self, fault: Fault, worker: SupervisedWorker, now: float) -> None:
        """Reports an env that has raised, or broken its spaces, and was rebuilt."""
        row = fault.env_index
        block = next(b for b in worker.blocks if row < b.stop)
        played = self._ring.read(row, block.start, has_failed=True)
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
        lost: Lost,
        running: Mapping[int, int],
        now: float,
    ) -> None:
        """Reports a worker that has died, or was killed, and the env that it was in.

        Args:
          worker: The worker.
          lost: How it has ended.
          running: Kind of operation by block, of blocks in flight.
          now: Monotonic seconds.
        """
        exit_ = worker.exit or Exit(0, 0)
        end = End(
            status=lost.status,
            text=lost.text,
            exit_code=None if worker.exit is None else exit_.exit_code,
            stderr_tail=exit_.stderr_tail,
        )
        parts, path = self._blame(worker, end, running, now)
        if exit_.last_words:
            last = _shortened(exit_.last_words, _MAX_CAUSE)
            parts.append(f'its stderr ends with "{last}"')
        cause, _, detail = lost.text.partition("\n")
        if detail:  # a traceback
            cause += f" {detail.splitlines()[-1]}"
        self._log(
            f"{worker.label}, pid {exit_.pid or None}, {_shortened(cause, _MAX_CAUSE)}",
            [*parts, *self._recipe(path)],
            detail or exit_.excerpt,
        )

    def forget(self, worker: SupervisedWorker) -> None:
        """Forgets what a worker's envs went through, for its successor's sake."""
        self._heartbeats[worker.index, :2] = 0
        for block in worker.blocks:
            for row in range(block.start, block.stop):
                self._ring.row(row, block.start)

    def _blame(
        self, worker: SupervisedWorker, end: End, running: Mapping[int, int], now: float
    ) -> tuple[list[str], Path | None]:
        """Says which env a worker was in as it ended, and writes a file of it."""
        beat, is_slow = self._heartbeats[worker.index, :2].tolist()
        row = row_of_beat(beat)
        hosts = [b for b in worker.blocks if row in range(b.start, b.stop)]
        if row is None or not any(is_slow or b.index in running for b in hosts):
            return ["no env was at work"], None
        (block,) = hosts
        played = self._ring.read(row, block.start)
        is_call = running.get(block.index) == Kind.CALL
        doing = "a call of" if is_call else "a reset of" if is_slow else "a step of"
        parts = [f"in {doing} env {self._index_of(row)}", *self._story(row, played)]
        if is_call:
            return parts, None
        config = self._config
        seconds = (
            config.reset_timeout_seconds if is_slow else config.step_timeout_seconds
        )
        return parts, self._write(row, played, end, seconds, now)

    def _log(self, head: str, parts: list[str], detail: str) -> None:
        """Logs a line; below it what it is about, when that is not as the last time."""
        below = "" if detail == self._last_detail else f"\n{printable(detail)}".rstrip()
        self._last_detail = detail
        line = "; ".join([head, *parts])
        self._logger.warning("%s%s%s", self._label, line, below)

    def _index_of(self, row: int) -> int:
        return self._config.first_env_index + row

    def _story(self, row: int, played: Played | None) -> list[str]:
        if played is None:
            return ["it was never reset"]
        incarnation, seed = played.incarnation, played.seed
        if seed is None:
            seed = env_seed(self._config.seed, self._index_of(row), incarnation)
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


def _shortened(text: str, length: int) -> str:
    text = one_line(text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _action_text(played: Played) -> str:
    with np.printoptions(precision=4, threshold=8, edgeitems=3):
        values = [str(array[-1]) for array in played.actions]
    text = values[0] if len(values) == 1 else f"({', '.join(values)})"
    return _shortened(text, _MAX_ACTION)
