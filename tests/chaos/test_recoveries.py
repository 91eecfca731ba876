"""How the time from a fault to the next valid row is told."""

from __future__ import annotations

import numpy as np
import pytest

from envserve.slab import Status
from tests.chaos.recoveries import Recoveries

OK, PENDING = Status.OK, Status.PENDING
DIED, LATE = Status.WORKER_DIED, Status.LATE


def note(
    recoveries: Recoveries, now: float, *status: Status, rows: np.ndarray | None = None
) -> None:
    """A call of a tenth of a second that ends now."""
    recoveries.note(np.array(status, np.uint8), now - 0.1, now, rows)


def test_a_fault_lasts_from_the_strike_to_the_first_valid_row_after_the_loss() -> None:
    recoveries = Recoveries(2)
    recoveries.strike(np.array([1]), 10.0)
    note(recoveries, 10.1, OK, OK)  # it was answered before it was hit
    note(recoveries, 10.2, OK, PENDING)
    note(recoveries, 10.3, OK, DIED)
    assert recoveries.seconds == []
    assert recoveries.is_open()
    assert recoveries.is_open(np.array([1]))
    assert not recoveries.is_open(np.array([0]))
    note(recoveries, 10.5, OK, OK)
    assert recoveries.seconds == [pytest.approx(0.5)]
    assert not recoveries.is_open()


@pytest.mark.parametrize(
    ("statuses", "seconds"),
    [
        ((DIED, OK), 0.2),  # it began with the call at the earliest
        ((DIED, PENDING, OK), 0.3),
        ((PENDING, LATE, OK), 0.3),
    ],
)
def test_a_fault_that_nobody_announced_is_told_by_what_comes(
    statuses: tuple[Status, ...], seconds: float
) -> None:
    recoveries = Recoveries(1)
    for number, status in enumerate(statuses, 1):
        assert recoveries.seconds == []
        note(recoveries, 10.0 + 0.1 * number, status)
    assert recoveries.seconds == [pytest.approx(seconds)]


def test_some_rows_may_be_noted_by_themselves() -> None:
    recoveries = Recoveries(3)
    note(recoveries, 10.1, DIED, rows=np.array([2]))
    note(recoveries, 10.2, OK, OK, rows=np.array([0, 1]))
    assert recoveries.seconds == []
    note(recoveries, 10.2, OK, rows=np.array([2]))
    assert len(recoveries.seconds) == 1


def test_a_fault_that_has_not_happened_is_forgotten() -> None:
    recoveries = Recoveries(1)
    recoveries.strike(np.array([0]), 10.0)
    recoveries.retract(np.array([0]))
    assert not recoveries.is_open()
    note(recoveries, 10.1, OK)
    assert recoveries.seconds == []
