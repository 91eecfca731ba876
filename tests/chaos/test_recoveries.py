"""The time from a fault to the next valid row."""

from __future__ import annotations

import numpy as np
import pytest

from envserve.slab import Status
from tests.chaos.recoveries import Recoveries

OK, PENDING = Status.OK, Status.PENDING
DIED, LATE = Status.WORKER_DIED, Status.LATE


def note(recoveries: Recoveries, now: float, *status: Status) -> None:
    """A call of a tenth of a second that ends now."""
    recoveries.note(np.array(status, np.uint8), now - 0.1, now)


def test_a_fault_lasts_from_the_strike_to_the_first_valid_row_after_the_loss() -> None:
    recoveries = Recoveries(2)
    recoveries.strike(np.array([0, 1]), 10.0)
    recoveries.retract(np.array([0]))  # that one did not happen
    note(recoveries, 10.1, OK, OK)  # it was answered before it was hit
    note(recoveries, 10.2, OK, PENDING)
    note(recoveries, 10.3, OK, DIED)
    assert recoveries.seconds == []
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
def test_an_unannounced_fault_begins_with_the_first_row_that_is_not_valid(
    statuses: tuple[Status, ...], seconds: float
) -> None:
    recoveries = Recoveries(1)
    for number, status in enumerate(statuses, 1):
        assert recoveries.seconds == []
        note(recoveries, 10.0 + 0.1 * number, status)
    assert recoveries.seconds == [pytest.approx(seconds)]
