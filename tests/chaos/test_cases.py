"""Every case of faults once, as small as can be, in real processes."""

from __future__ import annotations

import sys

import pytest

from tests.chaos.case_result import CaseResult
from tests.chaos.cases.table import CASES
from tests.chaos.trial import RowCorruption, run_case

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="cases look at processes in /proc: needs Linux"
)

CASE = {case.name: case for case in CASES}
#: How small a run may be, where it may not be as small as most.
SCALES = {
    **{"kill": 0.002, "slow": 0.0005, "server-kill": 0.01, "pause": 0.002},
    **{"network-reset": 0.02, "network-copies": 0.02, "network-retry": 0.03},
    **{"network-reorder": 0.02, "network-slices": 0.03, "network-latency": 0.01},
    "cancel": 0.0001,
}


def run(
    name: str, random_seed: int, corruption: RowCorruption | None = None
) -> CaseResult:
    scale = SCALES.get(name, 0.001)
    return run_case(CASE[name], seed=random_seed, scale=scale, corruption=corruption)


@pytest.mark.parametrize("name", CASE)
def test_a_wrong_row_is_noticed_after_a_fault(name: str, random_seed: int) -> None:
    corruption = RowCorruption()
    result = run(name, random_seed, corruption)
    assert result.verdict == "WRONG", result.error
    assert "expected reward" in result.error
    assert f"--seed {random_seed}" in result.error
    # Trainers that are killed have a corruption of their own.
    assert (result.faults and corruption.is_planted) or name == "trainer-kill"


@pytest.mark.parametrize(
    "name",
    ["kill", "raise", "hang", "elastic", "two-trainers"]
    + [name for name in CASE if name.startswith("network")],
)
def test_faults_alone_are_no_wrong_rows(name: str, random_seed: int) -> None:
    result = run(name, random_seed)
    assert result.is_sound, result.error
    assert result.faults
    assert result.row_steps
    # How quick it was is not the business of a test.
    assert all("seconds" in check.meaning for check in result.missed)
