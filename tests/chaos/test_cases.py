"""Every chaos case once, at minimal scale, with real processes."""

from __future__ import annotations

import sys

import pytest

from tests.chaos.case_result import CaseResult
from tests.chaos.cases.table import CASES
from tests.chaos.trial import RowCorruption, run_case

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="cases read /proc, which requires Linux"
)

CASE = {case.name: case for case in CASES}
#: Scales of cases for which the default is too small to cause a fault, or too slow.
SCALES = {
    **{"kill": 0.002, "slow": 0.0005, "server-kill": 0.01, "pause": 0.002},
    **{"network-reset": 0.01, "network-copies": 0.02, "network-retry": 0.03},
    **{"network-reorder": 0.02, "network-slices": 0.03, "network-latency": 0.01},
    "cancel": 0.0005,
}
#: Cases that also run to their end. A corrupted row ends a case early.
COMPLETE = [
    *("kill", "raise", "hang", "cancel", "elastic", "two-trainers"),
    *(name for name in CASE if name.startswith("network")),
]
#: Cases in which a row is corrupted. Two of `COMPLETE` suffice, because the same code
#: verifies the rows of all of them; `test_command` also corrupts a row in `kill`.
CORRUPTED = [
    *(name for name in CASE if name not in COMPLETE),
    *("two-trainers", "network-copies"),
]


def run(
    name: str, random_seed: int, corruption: RowCorruption | None = None
) -> CaseResult:
    scale = SCALES.get(name, 0.001)
    return run_case(CASE[name], seed=random_seed, scale=scale, corruption=corruption)


@pytest.mark.parametrize("name", CORRUPTED)
def test_a_corrupted_row_is_detected_after_a_fault(name: str, random_seed: int) -> None:
    corruption = RowCorruption()
    result = run(name, random_seed, corruption)
    assert result.verdict == "WRONG", result.error
    assert "expected reward" in result.error
    assert f"--seed {random_seed}" in result.error
    # In trainer-kill, the trainers corrupt a row in their own processes.
    assert (result.faults and corruption.has_corrupted_row) or name == "trainer-kill"


@pytest.mark.parametrize("name", COMPLETE)
def test_faults_cause_no_wrong_rows(name: str, random_seed: int) -> None:
    result = run(name, random_seed)
    assert result.is_sound, result.error
    assert result.faults
    assert result.row_steps
    # Time limits may be missed, because tests must not depend on the machine's speed.
    assert all("seconds" in check.meaning for check in result.missed)
