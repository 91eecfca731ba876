"""A case, and one run of it: how large, with what chance, until when."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from envserve.client import StepResult
from envserve.slab import Status
from tests.chaos.case_result import CaseResult
from tests.oracle.result import LedgerError

#: However small the scale, processes have to start and end, on a busy machine.
_LEAST_SECONDS: Final = 300.0


class OutOfTime(Exception):
    """A case has not come to its end in its time."""


class RowCorruption:
    """A wrong row on purpose: one that is valid gets the reward of another action."""

    def __init__(self, after_faults: int = 1) -> None:
        self.is_planted = False
        self._after_faults = after_faults

    def spoil(self, result: StepResult, num_faults: int) -> StepResult:
        valid = np.flatnonzero(result.status == Status.OK)
        if self.is_planted or num_faults < self._after_faults or not valid.size:
            return result
        self.is_planted = True
        reward = result.reward.copy()
        reward[valid[0]] += 1.0
        return result._replace(reward=reward)


class Trial:
    """One run of a case.

    Attributes:
      scale: 1 for the full counts.
      folder: For files; gone after the run.
      corruption: Spoils results before they are checked, to test the check; or None.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        scale: float,
        seconds: float,
        folder: Path,
        corruption: RowCorruption | None = None,
    ) -> None:
        self.name = name
        self.seed = seed
        self.scale = scale
        own_seed = zlib.crc32(f"{seed} {name}".encode())
        self.random = np.random.default_rng(own_seed)
        self.folder = folder
        self.result = CaseResult()
        self.corruption = corruption
        self.began = time.monotonic()
        self._give_up_at = self.began + seconds
        self._numbers = itertools.count()

    def count(self, at_full_scale: int, least: int = 1) -> int:
        return max(least, round(at_full_scale * self.scale))

    def seconds(self, at_full_scale: float, least: float) -> float:
        """Returns how long something shall take; in full from a tenth of all on."""
        return min(at_full_scale, max(least, 10.0 * self.scale * at_full_scale))

    def spoil(self, result: StepResult) -> StepResult:
        if self.corruption is None:
            return result
        return self.corruption.spoil(result, self.result.faults)

    def draw_seed(self) -> int:
        return int(self.random.integers(2**62))

    def new_folder(self, name: str) -> Path:
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def check_time(self) -> None:
        if time.monotonic() > self._give_up_at:
            raise OutOfTime(
                f"expected it to end within {self._give_up_at - self.began:.0f} s; it "
                f"had {self.result.faults} faults by then"
            )


@dataclass(frozen=True)
class ChaosCase:
    """Faults of one kind.

    Attributes:
      seconds: Longest that it may take at scale 1.
    """

    name: str
    does: str
    goal: str
    run: Callable[[Trial], None]
    seconds: float = 600.0

    def most_seconds(self, scale: float) -> float:
        return max(_LEAST_SECONDS, self.seconds * scale)


def chaos_case(
    does: str, goal: str, *, seconds: float = 600.0
) -> Callable[[Callable[[Trial], None]], ChaosCase]:
    """Makes a case of a function, which gives it its name; the rest as of ChaosCase."""

    def make(run: Callable[[Trial], None]) -> ChaosCase:
        name = run.__name__.strip("_").replace("_", "-")
        return ChaosCase(name, does, goal, run, seconds)

    return make


def run_case(
    case: ChaosCase,
    *,
    seed: int,
    scale: float = 1.0,
    corruption: RowCorruption | None = None,
) -> CaseResult:
    """Runs a case in this process, and returns what has come of it, whatever has."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        trial = Trial(
            case.name,
            seed=seed,
            scale=scale,
            seconds=case.most_seconds(scale),
            folder=Path(folder),
            corruption=corruption,
        )
        result = trial.result
        repeat = f"repeat it with: chaos.py {case.name} --seed {seed} --scale {scale:g}"
        if sys.platform != "linux":
            result.skipped = "it looks at processes in /proc, which only Linux has"
            return result
        try:
            case.run(trial)
        except (LedgerError, OutOfTime) as error:
            result.wrong += isinstance(error, LedgerError)
            result.error = f"{error}; {repeat}"
        except Exception as error:
            summary = f"{type(error).__name__}: {error}"
            result.error = f"{summary}; {repeat}\n{traceback.format_exc()}"
        result.elapsed = time.monotonic() - trial.began
        result.check("wrong transitions", result.wrong, 0, "==")
    return result


def check_latency(result: CaseResult, bound: float) -> None:
    """Holds the seconds from fault to valid row to a goal."""
    result.check("p99 seconds to a valid row", result.quantile(99), bound)
