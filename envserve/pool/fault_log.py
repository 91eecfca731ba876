"""Log each fault in one line, and write a repro file for replaying the fault.

The line names the worker, the env, the cause and the command that replays the fault. A
traceback, the Python stack of a crash, or the end of stderr follows. Repeats of a
recent fault (ignoring differences in numbers) are counted, and logged at most once per
second. "Replay a crash" in the docs describes the format.

After a worker's death, its heartbeat shows which env was running, and the action ring
contains the last actions of this env; both are in shared memory.
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
from envserve.lane import Block, Fault
from envserve.pool.supervisor import SupervisedWorker
from envserve.pool.worker_states import Exit, Lost
from envserve.settings import PoolSettings
from envserve.slab import Slab, Status, row_of_beat
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import flatten
from envserve.spaces.variable_length import decode_actions
from envserve.text import (
    LOG_INTERVAL,
    LogThrottle,
    exception_line,
    one_line,
    printable,
    words_without_numbers,
)
from envserve.worker.channel import MessageKind

_LOGGER: Final = logging.getLogger("envserve.pool")
#: Maximum lengths of the cause of a fault, and of the env's last action, in a log line.
_MAX_CAUSE_CHARS: Final = 300
_MAX_ACTION_CHARS: Final = 80
#: Maximum number of classes of envs and spaces whose warnings are logged.
_MAX_WARNED_CLASSES: Final = 16
#: Maximum number of different faults to log in full within `_RECENT_SECONDS`. Further
#: faults are treated like repeated ones.
_MAX_RECENT_FAULTS: Final = 8
_RECENT_SECONDS: Final = 60.0
#: Once the last log line is this old, the number of faults since then is logged.
_QUIET_SECONDS: Final = 2 * LOG_INTERVAL
#: Maximum number of attempts to read a record while its worker does not change it.
_MAX_READS: Final = 8


class FaultLog:
    """Logs the faults of one pool.

    Attributes:
      reset_options: Encoded options of the last reset that had options, by row.
    """

    def __init__(
        self, config: PoolSettings, blocks: Sequence[Block], label: str, owner: str
    ) -> None:
        """Store settings and blocks, the prefix of log lines, and the envs' owner."""
        self._config = config
        self._worker_of_row = [block.worker for block in blocks for _ in block.rows]
        self._label = f"{label}: " if label else ""
        self._crash_folder = None
        if config.crash_dir not in (None, "none"):
            folder = Path(config.crash_dir) if config.crash_dir else None
            self._crash_folder = CrashFolder(folder, owner)
        # Maps the texts of recent faults, without numbers, to their times.
        self._recent: dict[object, float] = {}
        self._throttle = LogThrottle()
        self._heartbeats: np.ndarray[Any, Any] | None = None  # set by `attach`
        self._warned: set[str] = set()
        self.reset_options: dict[int, bytes] = {}

    def attach(self, slab: Slab, spec: EnvSpec) -> None:
        """Set the slab from which to read heartbeats and actions."""
        self._heartbeats = slab.heartbeats
        self._spec = spec
        self._ring = ActionRing(spec, self._config.num_envs, slab.extra)

    def log_suppressed(self, now: float, least_age: float = _QUIET_SECONDS) -> None:
        """Log how many faults were suppressed since the last log line.

        Do nothing if that line is less than `least_age` seconds old.
        """
        if more := self._throttle.take_suppressed("faults", now, least_age):
            _LOGGER.warning("%sfaults like those above: %s", self._label, more)

    def log_env_failure(
        self, fault: Fault, worker: SupervisedWorker, now: float
    ) -> None:
        """Log an env that raised an error or violated its spaces, and was rebuilt.

        No repro file is written if only a reset failed, and the retry succeeded.
        """
        admitted = self._admit(fault.text, now)
        if admitted is None:
            return
        row, status, phrases = fault.env_index, fault.status, list[str]()
        where = "in a reset " if status == Status.OK else ""
        if not where:
            history = self._read_history(row, has_failed=True)
            end = End(status=status, text=fault.text, is_violation=fault.is_violation)
            path = self._write_repro_file(row, history, end, now)
            phrases = [
                *self._describe_history(row, history),
                *self._replay_command(path),
            ]
        pid = None
        if worker.process is not None:
            worker.process.poll_exit()  # reads the reports that set `pid`
            pid = worker.process.pid
        name = f"Env {self._index_of(row)}"
        if self._config.vectorized:
            block = next(b for b in worker.blocks if row in b.rows)
            name = f"The vector env of envs {self._index_of(row)} to "
            name += f"{self._index_of(block.stop - 1)}"
        self._log(
            f"{name} (worker {worker.index}, pid {pid}) failed {where}and "
            f"was rebuilt: {_shorten(fault.cause, _MAX_CAUSE_CHARS)}",
            phrases,
            fault.text.strip().removesuffix(fault.cause),
            admitted,
        )

    def log_reset_error(self, error: EnvError, num_faults: int, now: float) -> None:
        """Log that some rows of a block rejected the seeds or options of a reset.

        This is usually the caller's mistake, and the caller receives the error.
        Therefore no repro file is written.
        """
        admitted = self._admit(f"{error.remote_traceback}\n{error}", now)
        if admitted is not None:
            head = _shorten(str(error).partition("\n")[0], _MAX_CAUSE_CHARS)
            others = [f"{num_faults - 1} more in its block"] if num_faults > 1 else []
            self._log(head, others, error.remote_traceback, admitted)

    def log_worker_loss(
        self,
        worker: SupervisedWorker,
        lost: Lost,
        running: Mapping[int, int],
        now: float,
    ) -> None:
        """Log the loss of a worker, and the env that was running.

        `running` maps the index of each block in flight to the kind of its operation.
        """
        exit_ = worker.exit or Exit(0, 0)
        admitted = self._admit(f"{exit_.stderr_excerpt}\n{lost.text}", now)
        if admitted is None:
            return
        end = End(
            status=lost.status,
            text=lost.text,
            exit_code=None if worker.exit is None else exit_.exit_code,
            stderr_tail=exit_.stderr_tail,
        )
        phrases, path = list[str](), None
        if not worker.was_replaced:
            phrases, path = self._locate_fault(worker, end, running, now)
        if exit_.stderr_summary:
            summary = _shorten(exit_.stderr_summary, _MAX_CAUSE_CHARS)
            phrases.append(f'its stderr ends with "{summary}"')
        cause, _, detail = lost.text.partition("\n")
        if detail:  # `detail` is a traceback
            cause += f" {exception_line(detail)}"
        cause = _shorten(cause, _MAX_CAUSE_CHARS)
        self._log(
            f"{worker.label}, pid {exit_.pid or None}, {cause}",
            [*phrases, *self._replay_command(path)],
            detail or exit_.stderr_excerpt,
            admitted,
        )

    def warn_once(self, warnings: Sequence[str]) -> Sequence[str]:
        """Log warnings, once per class of env or space; return the logged warnings."""
        by_class = {warning.partition(" ")[0]: warning for warning in warnings}
        new = [name for name in by_class if name not in self._warned]
        new = new[: _MAX_WARNED_CLASSES - len(self._warned)]
        self._warned.update(new)
        for name in new:
            _LOGGER.warning("%s%s", self._label, by_class[name])
        return [by_class[name] for name in new]

    def clear_records(self, worker: SupervisedWorker) -> None:
        """Clear a lost worker's heartbeat and action records, before its next start."""
        assert self._heartbeats is not None, "the pool is ready"
        self._heartbeats[worker.index, :2] = 0
        for block in worker.blocks:
            for row in block.rows:
                self._ring.row_record(row)

    def _locate_fault(
        self, worker: SupervisedWorker, end: End, running: Mapping[int, int], now: float
    ) -> tuple[list[str], Path | None]:
        """Find the env that was running when a worker ended, and write its repro file.

        Returns:
          Phrases about this env for the log line, and the path of its repro file, or
          None if no file was written.
        """
        if self._heartbeats is None:  # no env is ready yet
            return [], None
        # For `call_kind`, see `Slab.heartbeats`; it is 0 during an ordinary step.
        beat, call_kind = self._heartbeats[worker.index, :2].tolist()
        row = row_of_beat(beat)
        blocks = [block for block in worker.blocks if row in block.rows]
        if row is None or not any(call_kind or b.index in running for b in blocks):
            return ["no env was running"], None
        (block,) = blocks
        history = self._read_history(row)
        is_call = running.get(block.index) == MessageKind.CALL
        operation = "call" if is_call else "reset" if call_kind == 1 else "step"
        phrases = [
            f"in a {operation} of env {self._index_of(row)}",
            *self._describe_history(row, history),
        ]
        if is_call:
            return phrases, None
        return phrases, self._write_repro_file(
            row, history, end, now, has_reset_timeout=bool(call_kind)
        )

    def _admit(self, text: str, now: float) -> tuple[bool, str] | None:
        """Return whether a fault is new, and the suffix of its log line.

        The suffix states how many faults were not logged since the last line. Return
        None if this fault must not be logged either. Faults are equal if their `text`
        (cause and details) differs only in numbers.
        """
        kind = words_without_numbers(text)
        self._recent = recent = {
            known: time
            for known, time in self._recent.items()
            if now - time < _RECENT_SECONDS
        }
        is_new = kind not in recent and len(recent) < _MAX_RECENT_FAULTS
        if is_new or kind in recent:
            recent[kind] = now
        more = self._throttle.admit("faults", now, is_new=is_new)
        return None if more is None else (is_new, more)

    def _log(
        self, head: str, phrases: list[str], detail: str, admitted: tuple[bool, str]
    ) -> None:
        """Log a line, followed by its details if the fault is new; see `_admit`."""
        is_new, more = admitted
        details = f"\n{printable(detail)}".rstrip() if is_new else ""
        line = "; ".join([head, *phrases])
        # Only `details` contains newlines, so the log formatter need not escape them.
        extra = {"is_multiline": True}
        _LOGGER.warning("%s%s%s%s", self._label, line, more, details, extra=extra)

    def reset_error(self, fault: Fault) -> EnvError:
        """Return the exception for an env whose reset has failed."""
        suffix = ", and the env was reset without seed and options"
        return EnvError(
            f"Env {self._index_of(fault.env_index)}: reset failed"
            f"{'' if self._config.vectorized else suffix}: {fault.cause}",
            env_index=fault.env_index,
            remote_traceback=fault.detail,
        )

    def _read_history(
        self, row: int, *, has_failed: bool = False
    ) -> ActionHistory | None:
        options = self.reset_options.get(row, b"")
        return self._ring.read(row, options, has_failed=has_failed)

    def _index_of(self, row: int) -> int:
        return self._config.first_env_index + row

    def _describe_history(self, row: int, history: ActionHistory | None) -> list[str]:
        if history is None:
            return ["it was never reset"]
        incarnation, seed = history.incarnation, history.seed
        if seed is None and self._config.seeded:
            seed = env_seed(self._config.seed, self._index_of(row), incarnation)
        phrases = [
            f"incarnation {incarnation}",
            f"seed {seed}",
            f"step {history.episode_step} of its episode",
        ]
        if all(len(array) for array in history.actions):
            phrases.append(f"last action {_format_action(self._spec, history)}")
        return phrases

    def _write_repro_file(
        self,
        row: int,
        history: ActionHistory | None,
        end: End,
        now: float,
        *,
        has_reset_timeout: bool = False,
    ) -> Path | None:
        if (
            self._crash_folder is None
            or history is None
            or not self._crash_folder.may_write(now)
        ):
            return None
        name = self._config.env_name
        name = f"{name}-env-{self._index_of(row)}-{end.status.name.lower()}"
        return self._crash_folder.write(
            name, self._encode_repro(row, history, end, has_reset_timeout), now
        )

    def flight_record(self, row: int) -> bytes:
        """Return the repro file of a running env; empty if it was never reset."""
        history, counts = None, self._ring.counts
        for _ in range(_MAX_READS if row < len(counts) else 0):
            count, history = counts[row], self._read_history(row)
            if count == counts[row]:
                break
        if history is None:
            return b""
        end = End(status=Status.OK, text="was running when this was recorded")
        return self._encode_repro(row, history, end)

    def _encode_repro(
        self,
        row: int,
        history: ActionHistory,
        end: End,
        has_reset_timeout: bool = False,
    ) -> bytes:
        config = self._config
        timeouts = config.step_timeout_seconds, config.reset_timeout_seconds
        repro = Repro(
            env_name=config.env_name,
            env_kwargs=dict(config.kwargs_of(row)),
            wrappers=config.wrappers,
            import_modules=config.import_modules,
            autoreset=config.autoreset,
            vectorized=config.vectorized,
            nonfinite=config.nonfinite,
            strict_spaces=config.strict_spaces,
            root_seed=int(config.seed),
            seeded=config.seeded,
            env_index=int(self._index_of(row)),
            timeout_seconds=timeouts[has_reset_timeout],
            played=history,
            end=end,
            context=config.context_of(
                row, self._worker_of_row[row], max(self._worker_of_row) + 1
            ),
        )
        return encode_repro(repro)

    def _replay_command(self, path: Path | None) -> list[str]:
        if path is None:
            return []
        if self._config.vectorized:  # other rows may have caused the fault
            return [f"the actions of its first row are in {path}"]
        if not self._config.is_replayable:
            return [
                f"its actions are in {path}; to replay such faults, move the env, its "
                f"wrappers and its arguments from the script to a separate file"
            ]
        imports = "".join(
            f" --import {shlex.quote(module)}" for module in self._config.import_modules
        )
        return [f"to replay it: envserve replay {shlex.quote(str(path))}{imports}"]


def _shorten(text: str, length: int) -> str:
    text = one_line(text)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _format_action(spec: EnvSpec, history: ActionHistory) -> str:
    last: list[Any] = [array[-1:] for array in history.actions]
    with contextlib.suppress(CodecError):  # on an error, show the encoded bytes
        last = flatten(spec.action_space, decode_actions(spec, last)[0])
    with np.printoptions(precision=4, threshold=8, edgeitems=3):
        values = list(map(str, last))
    text = values[0] if len(values) == 1 else f"({', '.join(values)})"
    return _shorten(text, _MAX_ACTION_CHARS)
