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

from envserve.chaos.outcome import Outcome
from envserve.chaos.plant import Plant
from envserve.client import StepResult
from envserve.testing import LedgerError

__all__ = ["ChaosCase", "OutOfTime", "Skip", "Trial", "run_case"]

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
      outcome: What the case is to fill.
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
        """Starts the clock; the case may take `seconds`."""
        self.name = name
        self.seed = seed
        self.scale = scale
        own_seed = zlib.crc32(f"{seed} {name}".encode())
        self.random = np.random.default_rng(own_seed)
        self.folder = folder
        self.outcome = Outcome()
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
        return self.plant.spoil(result, self.outcome.faults)

    def draw_seed(self) -> int:
        """Returns a root seed for envs."""
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
                f"had {self.outcome.faults} faults by then"
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
        """Returns after how long a run is given up."""
        return max(_LEAST_SECONDS, self.seconds * scale)


def run_case(
    case: ChaosCase, *, seed: int, scale: float = 1.0, plant: Plant | None = None
) -> Outcome:
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
        outcome = trial.outcome
        repeat = f"repeat it with: chaos.py {case.name} --seed {seed} --scale {scale:g}"
        try:
            if sys.platform != "linux":
                raise Skip("it looks at processes in /proc, which only Linux has")
            with contextlib.closing(_Stopwatch(outcome)):
                case.run(trial)
        except Skip as reason:
            outcome.skipped = str(reason)
        except LedgerError as error:
            outcome.wrong += 1
            outcome.error = f"{error}; {repeat}"
        except OutOfTime as error:
            outcome.error = f"{error}; {repeat}"
        except Exception as error:
            summary = f"{type(error).__name__}: {error}"
            outcome.error = f"{summary}; {repeat}\n{traceback.format_exc()}"
        outcome.check("wrong transitions", outcome.wrong, 0, "==")
    return outcome


class _Stopwatch:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._began = time.monotonic()

    def close(self) -> None:
        self._outcome.elapsed = time.monotonic() - self._began


def check_latency(outcome: Outcome, percent: float, bound: float) -> None:
    """Holds a percentile of the seconds from fault to valid row to a goal."""
    name = "max" if math.isclose(percent, 100) else f"p{percent:g}"
    outcome.check(f"{name} seconds to a valid row", outcome.quantile(percent), bound)
