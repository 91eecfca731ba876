"""Both halves over a network, hosts and workers that fail; virtual time, seeded.

`envserve.chaos.sessions` says what must hold; `scripts/simulate_sessions.py` runs more.
"""

from __future__ import annotations

import logging
import re

import pytest

from envserve.chaos.sessions import Violation, simulate
from tests.envserve.session_bugs import BUGS, Bug, session_numbers_are_used_again

#: Together 1 million events in every run.
NUM_TESTS = 10
SEEDS_PER_TEST = 5
EVENTS_PER_SEED = 20_000

#: What a planted bug may take to be found.
MAX_SEEDS = 30
EVENTS_PER_BUG = 4_000

#: Seeds that once failed, with their number of events, and what they have shown.
REGRESSIONS = {
    (46, 4_000): "a session's end was not told by what was asked for after it",
    (73, 4_000): "a copy of an ATTACH to the server before ended a new one",
    (14, 4_000): "envs that broke while they were built anew were asked for in vain",
    (1759285449, 20_000): "a step of lost envs that was to be refused met their error",
}


@pytest.fixture(autouse=True)
def quiet_sessions(caplog: pytest.LogCaptureFixture) -> None:
    """Faults are logged, a line for each: here there are thousands."""
    caplog.set_level(logging.CRITICAL, "envserve")


@pytest.mark.parametrize("part", range(NUM_TESTS))
def test_whatever_fails_no_transition_is_wrong(part: int, random_seed: int) -> None:
    num_valid = num_events = 0
    for index in range(SEEDS_PER_TEST):
        world = simulate(random_seed + index, EVENTS_PER_SEED)
        num_events += world.clock.num_events
        num_valid += sum(caller.num_valid for caller in world.callers)
    assert num_events >= SEEDS_PER_TEST * EVENTS_PER_SEED
    assert num_valid > num_events // 100


@pytest.mark.parametrize(
    ("seed", "num_events"), REGRESSIONS, ids=[str(seed) for seed, _ in REGRESSIONS]
)
def test_seeds_that_failed_once(seed: int, num_events: int) -> None:
    simulate(seed, num_events)


def test_a_seed_gives_the_same_simulation_again() -> None:
    first, second = simulate(3, 2_000), simulate(3, 2_000)
    assert first.clock.num_events == second.clock.num_events
    assert first.clock.trace == second.clock.trace


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_is_found_within_a_few_seeds(
    bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug.plant(monkeypatch)
    assert is_found(bug)


@pytest.mark.parametrize(
    "bug", [bug for bug in BUGS if bug.shows], ids=lambda bug: bug.plant.__name__
)
def test_epochs_and_boots_hold_even_if_session_numbers_come_again(
    bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_numbers_are_used_again(monkeypatch)
    assert not is_found(bug)


def is_found(bug: Bug) -> bool:
    """Whether any of a few seeds shows what the bug does."""
    for seed in range(MAX_SEEDS):
        try:
            simulate(seed, EVENTS_PER_BUG, bug.profile)
        except Violation as violation:
            if re.search(bug.shows, str(violation)):
                return True
    return False
