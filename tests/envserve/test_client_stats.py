"""Counters of a batch: rows by status, and the fraction of valid rows."""

import numpy as np
import pytest

from envserve.client.stats import BatchStats, StepRecorder
from envserve.slab import Status


def test_the_fill_is_1_before_the_first_step() -> None:
    assert StepRecorder().stats([]) == BatchStats(steps=0, rows=0, valid_rows=0)
    assert StepRecorder().stats([]).fill == 1.0


def test_rows_are_counted_by_status() -> None:
    recorder = StepRecorder()
    for status in ([0, 0, 0], [0, Status.PENDING, Status.LATE], [0, 0, Status.PENDING]):
        array = np.array(status, np.uint8)
        recorder.steps += 1
        recorder.rows += len(array)
        recorder.count_invalid(array == Status.OK, array)
    stats = recorder.stats([])
    assert (stats.steps, stats.rows, stats.valid_rows) == (3, 9, 6)
    assert stats.invalid_rows == {"PENDING": 2, "LATE": 1}
    assert stats.fill == pytest.approx(2 / 3)


def test_latencies_are_those_of_the_last_steps() -> None:
    recorder = StepRecorder()
    recorder.latencies.extend([9.0] * 10 + [1.0] * 1024)
    assert recorder.stats([]).latency_seconds == {"p50": 1.0, "p99": 1.0, "max": 1.0}


def test_printed_stats_are_short() -> None:
    stats = BatchStats(
        steps=1234,
        rows=8,
        valid_rows=6,
        invalid_rows={"ENV_ERROR": 2},
        latency_seconds={"p50": 0.004476838499954283, "p99": 9.997e-4, "max": 7.071},
        lanes={"tcp://sim1:5555": {"resends": 1}},
    )
    assert str(stats) == (
        "1,234 steps; 6 of 8 rows valid; ENV_ERROR: 2; p50 4.48 ms; "
        "p99 1,000 us; max 7.07 s; "
        "tcp://sim1:5555: resends 1"
    )
