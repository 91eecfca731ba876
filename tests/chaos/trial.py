"""A chaos case, and one run of it with its seed, scale and time limit."""

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

#: Minimum time limit in seconds, because processes take long to start and exit on a
#: busy machine.
_LEAST_SECONDS: Final = 300.0


class OutOfTime(Exception):
    """A case exceeded its time limit."""


class RowCorruption:
    """Gives one valid row a wrong reward, to test that the error is detected."""

    def __init__(self, after_faults: int = 1) -> None:
        self.has_corrupted_row = False
        self._after_faults = after_faults

    def corrupt(self, result: StepResult, num_faults: int) -> StepResult:
        valid = np.flatnonzero(result.status == Status.OK)
        if self.has_corrupted_row or num_faults < self._after_faults or not valid.size:
            return result
        self.has_corrupted_row = True
        reward = result.reward.copy()
        reward[valid[0]] += 1.0
        return result._replace(reward=reward)


class Trial:
    """One run of a case.

    Attributes:
      scale: Share of the full counts; 1 is a full run.
      folder: Folder for temporary files, deleted after the run.
      corruption: Corrupts a result before it is verified; None for no corruption.
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
        case_seed = zlib.crc32(f"{seed} {name}".encode())
        self.random = np.random.default_rng(case_seed)
        self.folder = folder
        self.result = CaseResult()
        self.corruption = corruption
        self.began = time.monotonic()
        self._give_up_at = self.began + seconds
        self._numbers = itertools.count()

    def count(self, at_full_scale: int, least: int = 1) -> int:
        return max(least, round(at_full_scale * self.scale))

    def seconds(self, at_full_scale: float, least: float) -> float:
        """Return the full duration at scale 0.1 and above, and a shorter one below."""
        return min(at_full_scale, max(least, 10.0 * self.scale * at_full_scale))

    def corrupt(self, result: StepResult) -> StepResult:
        if self.corruption is None:
            return result
        return self.corruption.corrupt(result, self.result.faults)

    def draw_seed(self) -> int:
        return int(self.random.integers(2**62))

    def new_folder(self, name: str) -> Path:
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def check_time(self) -> None:
        if time.monotonic() > self._give_up_at:
            raise OutOfTime(
                f"expected the case to end within {self._give_up_at - self.began:.0f} "
                f"s; it had {self.result.faults} faults so far"
            )


@dataclass(frozen=True)
class ChaosCase:
    """A case: faults of one kind, and the goal to be met.

    Attributes:
      seconds: Time limit at scale 1.
    """

    name: str
    fault: str
    goal: str
    run: Callable[[Trial], None]
    seconds: float = 600.0

    def max_seconds(self, scale: float) -> float:
        return max(_LEAST_SECONDS, self.seconds * scale)


def chaos_case(
    fault: str, goal: str, *, seconds: float = 600.0
) -> Callable[[Callable[[Trial], None]], ChaosCase]:
    """Return a decorator that turns a function into a case with the same name."""

    def make(run: Callable[[Trial], None]) -> ChaosCase:
        name = run.__name__.strip("_").replace("_", "-")
        return ChaosCase(name, fault, goal, run, seconds)

    return make


def run_case(
    case: ChaosCase,
    *,
    seed: int,
    scale: float = 1.0,
    corruption: RowCorruption | None = None,
) -> CaseResult:
    """Run a case in this process; return its result even if it failed."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        trial = Trial(
            case.name,
            seed=seed,
            scale=scale,
            seconds=case.max_seconds(scale),
            folder=Path(folder),
            corruption=corruption,
        )
        result = trial.result
        repeat = f"repeat it with: chaos.py {case.name} --seed {seed} --scale {scale:g}"
        if sys.platform != "linux":
            result.skipped = "it reads /proc, which requires Linux"
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
    """Check the 99th percentile of the time until a row is valid again."""
    result.check("p99 seconds to a valid row", result.quantile(99), bound)
