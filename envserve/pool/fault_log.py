"""What the host of an env gets to see of a fault: a line in the log, and a repro file.

The line names the env, its worker, the cause, and how to see it again.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from envserve.crashes.action_ring import ActionHistory, ActionRing
from envserve.crashes.crash_folder import CrashFolder
from envserve.crashes.repro_file import End, Repro, encode_repro
from envserve.envs.seeding import env_seed
from envserve.errors import CodecError, EnvError
from envserve.lane import Fault
from envserve.pool.supervisor import SupervisedWorker
from envserve.pool.worker_states import Exit, Lost
from envserve.settings import PoolSettings
from envserve.slab import Slab, Status, row_of_beat
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import flatten
from envserve.spaces.variable_length import action_values
from envserve.text import LogThrottle, one_line, printable
from envserve.worker.channel import Kind

__all__ = ["FaultLog"]

_LOGGER: Final = logging.getLogger("envserve.pool")
_MAX_CAUSE: Final = 300  # characters of what is said on the line
_MAX_ACTION: Final = 80
_MAX_WARNED: Final = 16  # classes of envs
#: How often a record is read until no step has come between.
_MAX_READS: Final = 8


class FaultLog:
    """Reports the faults of one pool.

    Attributes:
      options: What each row was last reset with, of those that had any; encoded.
    """

    def __init__(self, config: PoolSettings, label: str = "", owner: str = "") -> None:
        """Take the settings, the prefix of log lines, and the owner of the envs."""
        self._config = config
        self._label = f"{label}: " if label else ""
        self._files = None
        if config.crash_dir not in (None, "none"):
            folder = Path(config.crash_dir) if config.crash_dir else None
            self._files = CrashFolder(folder, owner)
        self._last_detail = ""
        self._throttle = LogThrottle()
        self._warned: set[str] = set()
        self.options: dict[int, bytes] = {}

    def attach(self, slab: Slab, spec: EnvSpec) -> None:
        """Takes the memory in which workers note what their envs go through."""
        self._heartbeats = slab.heartbeats
        self._spec = spec
        self._ring = ActionRing(spec, self._config.num_envs, slab.extra)

    def env_failed(self, fault: Fault, worker: SupervisedWorker, now: float) -> None:
        """Reports an env that has raised, or broken its spaces, and was rebuilt."""
        row = fault.env_index
        played = self._read(row, has_failed=True)
        end = End(status=fault.status, text=fault.text, is_violation=fault.is_violation)
        path = self._write(row, played, end, now)
        pid = None
        if worker.process is not None:
            worker.process.poll_exit()  # which hears of its start, too
            pid = worker.process.pid
        name = f"Env {self._index_of(row)}"
        if self._config.vectorized:
            block = next(b for b in worker.blocks if row in b.rows)
            name = f"The vector env of envs {self._index_of(row)} to "
            name += f"{self._index_of(block.stop - 1)}"
        self._log(
            f"{name} (worker {worker.index}, pid {pid}) failed and "
            f"was rebuilt: {_shortened(fault.cause, _MAX_CAUSE)}",
            [*self._story(row, played), *self._recipe(path)],
            fault.text.strip().removesuffix(fault.cause),
        )

    def reset_refused(self, error: EnvError, num_faults: int, now: float) -> None:
        """Reports a reset whose seeds or options rows of a block did not take.

        That is the caller's mistake as a rule, who hears of it: a line a second will
        do, without a traceback and a repro file for each env.
        """
        more = self._throttle.passes("reset", now)
        if more is not None:
            others = f"; {num_faults - 1} more of its block" if num_faults > 1 else ""
            head = _shortened(str(error).partition("\n")[0], _MAX_CAUSE)
            self._log(f"{head}{others}{more}", [], error.remote_traceback)

    def worker_lost(
        self,
        worker: SupervisedWorker,
        lost: Lost,
        running: Mapping[int, int],
        now: float,
    ) -> None:
        """Reports a worker that has died, or was killed, and the env that it was in.

        `running` has the kind of operation of each block that is in flight.
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

    def warn_once(self, notes: Sequence[str]) -> Sequence[str]:
        """Says what workers note, once for each class of envs; returns what is new."""
        new = {note.partition(" ")[0]: note for note in notes}
        if new.keys() <= self._warned or len(self._warned) > _MAX_WARNED:
            return ()
        self._warned |= new.keys()
        for note in new.values():
            _LOGGER.warning("%s%s", self._label, note)
        return [*new.values()]

    def forget(self, worker: SupervisedWorker) -> None:
        """Forgets what a worker's envs went through, for its successor's sake."""
        self._heartbeats[worker.index, :2] = 0
        for block in worker.blocks:
            for row in block.rows:
                self._ring.row(row)

    def _blame(
        self, worker: SupervisedWorker, end: End, running: Mapping[int, int], now: float
    ) -> tuple[list[str], Path | None]:
        """Says which env a worker was in as it ended, and writes a file of it."""
        beat, is_slow = self._heartbeats[worker.index, :2].tolist()
        row = row_of_beat(beat)
        hosts = [block for block in worker.blocks if row in block.rows]
        if row is None or not any(is_slow or b.index in running for b in hosts):
            return ["no env was at work"], None
        (block,) = hosts
        played = self._read(row)
        is_call = running.get(block.index) == Kind.CALL
        doing = "a call of" if is_call else "a reset of" if is_slow else "a step of"
        parts = [f"in {doing} env {self._index_of(row)}", *self._story(row, played)]
        if is_call:
            return parts, None
        return parts, self._write(row, played, end, now, is_reset=bool(is_slow))

    def _log(self, head: str, parts: list[str], detail: str) -> None:
        """Logs a line; below it what it is about, when that is not as the last time."""
        below = "" if detail == self._last_detail else f"\n{printable(detail)}".rstrip()
        self._last_detail = detail
        line = "; ".join([head, *parts])
        _LOGGER.warning("%s%s%s", self._label, line, below)

    def error_of(self, fault: Fault) -> EnvError:
        """Returns what to raise for an env that could not be reset as was asked."""
        then = ", and it was reset without seed and options"
        return EnvError(
            f"Env {self._index_of(fault.env_index)}: its reset failed"
            f"{'' if self._config.vectorized else then}: {fault.cause}",
            env_index=fault.env_index,
            remote_traceback=fault.detail,
        )

    def _read(self, row: int, *, has_failed: bool = False) -> ActionHistory | None:
        options = self.options.get(row, b"")
        return self._ring.read(row, options, has_failed=has_failed)

    def _index_of(self, row: int) -> int:
        return self._config.first_env_index + row

    def _story(self, row: int, played: ActionHistory | None) -> list[str]:
        if played is None:
            return ["it was never reset"]
        incarnation, seed = played.incarnation, played.seed
        if seed is None and self._config.seeded:
            seed = env_seed(self._config.seed, self._index_of(row), incarnation)
        story = [
            f"incarnation {incarnation}",
            f"seed {seed}",
            f"step {played.episode_step} of its episode",
        ]
        if all(len(array) for array in played.actions):
            story.append(f"last action {_action_text(self._spec, played)}")
        return story

    def _write(
        self,
        row: int,
        played: ActionHistory | None,
        end: End,
        now: float,
        *,
        is_reset: bool = False,
    ) -> Path | None:
        if self._files is None or played is None or not self._files.has_room(now):
            return None
        name = self._config.env_name
        name = f"{name}-env-{self._index_of(row)}-{end.status.name.lower()}"
        return self._files.write(name, self._repro(row, played, end, is_reset), now)

    def record(self, row: int) -> bytes:
        """Return the repro file of a running env; empty if it was never reset."""
        played, counts = None, self._ring.counts
        for _ in range(_MAX_READS if row < len(counts) else 0):
            count, played = counts[row], self._read(row)
            if count == counts[row]:
                break
        if played is None:
            return b""
        end = End(status=Status.OK, text="went on when this was recorded")
        return self._repro(row, played, end)

    def _repro(
        self, row: int, played: ActionHistory, end: End, is_reset: bool = False
    ) -> bytes:
        config = self._config
        timeouts = config.step_timeout_seconds, config.reset_timeout_seconds
        repro = Repro(
            env_name=config.env_name,
            env_kwargs=dict(config.env_kwargs),
            wrappers=config.wrappers,
            import_modules=config.import_modules,
            autoreset=config.autoreset,
            vectorized=config.vectorized,
            nonfinite=config.nonfinite,
            strict_spaces=config.strict_spaces,
            root_seed=int(config.seed),
            seeded=config.seeded,
            env_index=int(self._index_of(row)),
            timeout_seconds=timeouts[is_reset],
            played=played,
            end=end,
        )
        return encode_repro(repro)

    def _recipe(self, path: Path | None) -> list[str]:
        if path is None:
            return []
        imports = "".join(
            f" --import {shlex.quote(module)}" for module in self._config.import_modules
        )
        what = (
            "what its first row saw" if self._config.vectorized else "to see it again"
        )
        return [f"{what}: envserve replay {shlex.quote(str(path))}{imports}"]


def _shortened(text: str, length: int) -> str:
    text = one_line(text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _action_text(spec: EnvSpec, played: ActionHistory) -> str:
    last: list[Any] = [array[-1:] for array in played.actions]
    with contextlib.suppress(CodecError):  # else bytes are shown
        last = flatten(spec.action_space, action_values(spec, last)[0])
    with np.printoptions(precision=4, threshold=8, edgeitems=3):
        values = list(map(str, last))
    text = values[0] if len(values) == 1 else f"({', '.join(values)})"
    return _shortened(text, _MAX_ACTION)
