"""Every case of faults once, as small as can be, in real processes."""

from __future__ import annotations

import sys

import pytest

from envserve.chaos.cases import CASES
from envserve.chaos.outcome import Outcome
from envserve.chaos.plant import Plant
from envserve.chaos.trial import run_case

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="cases look at processes in /proc: needs Linux"
)

CASE = {case.name: case for case in CASES}
#: How small a run may be. Of network faults, which are of one making, two are enough.
SCALES = {
    "kill": 0.002,
    "raise": 0.001,
    "hang": 0.001,
    "slow": 0.0005,
    "crash-loop": 0.001,
    "server-kill": 0.01,
    "server-gone": 0.001,
    "pause": 0.002,
    "network-reset": 0.001,
    "network-retry": 0.005,
    "trainer-kill": 0.001,
    "two-trainers": 0.001,
    "cancel": 0.0001,
    "drain": 0.001,
    "soak": 0.001,
}


def run(name: str, random_seed: int, plant: Plant | None = None) -> Outcome:
    return run_case(CASE[name], seed=random_seed, scale=SCALES[name], plant=plant)


@pytest.mark.parametrize("name", SCALES)
def test_a_wrong_row_is_noticed_after_a_fault(name: str, random_seed: int) -> None:
    plant = Plant()
    outcome = run(name, random_seed, plant)
    assert outcome.verdict == "WRONG", outcome.error
    assert "expected reward" in outcome.error
    assert f"--seed {random_seed}" in outcome.error
    # Trainers that are killed have a plant of their own.
    assert (outcome.faults and plant.is_planted) or name == "trainer-kill"


@pytest.mark.parametrize("name", ["kill", "raise", "hang", "network-retry"])
def test_faults_alone_are_no_wrong_rows(name: str, random_seed: int) -> None:
    outcome = run(name, random_seed)
    assert outcome.is_sound, outcome.error
    assert outcome.faults
    assert outcome.row_steps
    # How quick it was is not the business of a test.
    assert all("seconds" in check.meaning for check in outcome.missed)
