"""What a step gave besides rows: infos, faults, and errors of whole blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envserve.client.row_set import BatchBlock
from envserve.errors import EnvError, EnvserveError
from envserve.lane import Fault, Outcome
from envserve.slab import Status

__all__ = ["Gathered"]


@dataclass(slots=True)
class Gathered:
    """What came besides rows, by env index of the whole batch."""

    infos: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    faults: dict[int, Fault] = field(default_factory=dict)
    errors: list[EnvserveError] = field(default_factory=list)

    def add(self, outcome: Outcome, offset: int) -> None:
        """Adds a block's; a fault is reported in the row's info."""
        if outcome.error is not None:
            self.errors.append(outcome.error)
        for row, info in outcome.infos.items():
            self.infos[row + offset] = info
        for fault in outcome.faults:
            self.faults[fault.env_index + offset] = fault
            report = {"status": fault.status.name, "text": fault.text}
            self.infos[fault.env_index + offset] = {"fault": report}

    def first_error(
        self, blocks: Sequence[BatchBlock], raises_faults: bool
    ) -> EnvserveError | None:
        """Returns what to raise: what failed as a whole, or a fault that asks for it.

        Args:
          blocks: All blocks of the batch.
          raises_faults: Whether every fault asks for it; else one that broke the env's
            own spaces.
        """
        if self.errors:
            return self.errors[0]
        for env_index, fault in sorted(self.faults.items()):
            if fault.is_violation or raises_faults:
                block = next(block for block in blocks if env_index < block.stop)
                return _error_of(fault, env_index, block.lane.name)
        return None


def _error_of(fault: Fault, env_index: int, where: str) -> EnvError:
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
