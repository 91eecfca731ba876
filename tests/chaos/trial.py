"""A case, and one run of it: how large, with what chance, until when."""

from __future__ import annotations

import contextlib
import itertools
import math
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
from tests.chaos.case_result import CaseResult
from tests.chaos.plant import Plant
from tests.oracle.result import LedgerError

#: However small the scale, processes have to start and end, on a busy machine.
_LEAST_SECONDS: Final = 60.0


class Skip(Exception):
    """Raised by a case that cannot run here; says why."""


class OutOfTime(Exception):
    """A case has not come to its end in its time."""


class Trial:
    """One run of a case.

    Attributes:
      name: Of the case.
      seed: Of everything that is drawn.
      scale: 1 for the full counts.
      random: The generator of all that the case draws.
      folder: For files; gone after the run.
      result: What the case is to fill.
      plant: Spoils results before they are checked, to test the check; or None.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        scale: float,
        seconds: float,
        folder: Path,
        plant: Plant | None = None,
    ) -> None:
        self.name = name
        self.seed = seed
        self.scale = scale
        own_seed = zlib.crc32(f"{seed} {name}".encode())
        self.random = np.random.default_rng(own_seed)
        self.folder = folder
        self.result = CaseResult()
        self.plant = plant
        self.began = time.monotonic()
        self._give_up_at = self.began + seconds
        self._numbers = itertools.count()

    def count(self, at_full_scale: int, least: int = 1) -> int:
        """Returns how many of something there shall be."""
        return max(least, round(at_full_scale * self.scale))

    def seconds(self, at_full_scale: float, least: float) -> float:
        """Returns how long something shall take; in full from a tenth of all on."""
        return min(at_full_scale, max(least, 10.0 * self.scale * at_full_scale))

    def spoil(self, result: StepResult) -> StepResult:
        """Returns a result, spoiled if that is wanted and its turn has come."""
        if self.plant is None:
            return result
        return self.plant.spoil(result, self.result.faults)

    def draw_seed(self) -> int:
        return int(self.random.integers(2**62))

    def new_folder(self, name: str) -> Path:
        """Makes a folder that no other part of the run has."""
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def check_time(self) -> None:
        """Raises OutOfTime if the case should have ended by now."""
        if time.monotonic() > self._give_up_at:
            raise OutOfTime(
                f"expected it to end within {self._give_up_at - self.began:.0f} s; it "
                f"had {self.result.faults} faults by then"
            )


@dataclass(frozen=True)
class ChaosCase:
    """Faults of one kind.

    Attributes:
      name: How it is called.
      does: What is done, for the table.
      goal: What should come of it, for the table.
      run: Does it.
      seconds: Longest that it may take at scale 1.
    """

    name: str
    does: str
    goal: str
    run: Callable[[Trial], None]
    seconds: float = 600.0

    def most_seconds(self, scale: float) -> float:
        return max(_LEAST_SECONDS, self.seconds * scale)


def run_case(
    case: ChaosCase, *, seed: int, scale: float = 1.0, plant: Plant | None = None
) -> CaseResult:
    """Runs a case in this process, and returns what has come of it, whatever has."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        trial = Trial(
            case.name,
            seed=seed,
            scale=scale,
            seconds=case.most_seconds(scale),
            folder=Path(folder),
            plant=plant,
        )
        result = trial.result
        repeat = f"repeat it with: chaos.py {case.name} --seed {seed} --scale {scale:g}"
        try:
            if sys.platform != "linux":
                raise Skip("it looks at processes in /proc, which only Linux has")
            with contextlib.closing(_Stopwatch(result)):
                case.run(trial)
        except Skip as reason:
            result.skipped = str(reason)
        except LedgerError as error:
            result.wrong += 1
            result.error = f"{error}; {repeat}"
        except OutOfTime as error:
            result.error = f"{error}; {repeat}"
        except Exception as error:
            summary = f"{type(error).__name__}: {error}"
            result.error = f"{summary}; {repeat}\n{traceback.format_exc()}"
        result.check("wrong transitions", result.wrong, 0, "==")
    return result


class _Stopwatch:
    def __init__(self, result: CaseResult) -> None:
        self._result = result
        self._began = time.monotonic()

    def close(self) -> None:
        self._result.elapsed = time.monotonic() - self._began


def check_latency(result: CaseResult, percent: float, bound: float) -> None:
    """Holds a percentile of the seconds from fault to valid row to a goal."""
    name = "max" if math.isclose(percent, 100) else f"p{percent:g}"
    result.check(f"{name} seconds to a valid row", result.quantile(percent), bound)
