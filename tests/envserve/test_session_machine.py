"""The simulated sessions again, with Hypothesis to choose what happens next.

A failure shrinks to the few events that it takes.
"""

from __future__ import annotations

import logging

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.worlds.faults import strike
from tests.worlds.profile import FAULTS, Profile
from tests.worlds.world import World

#: Nothing fails by itself, and two callers do not find room at once.
PROFILE = Profile(num_callers=2, envs_per_worker=2, max_outage=100.0)
#: Prefix of what delivers a message.
ARRIVAL = "_arrive"

POSITIONS = st.integers(0, 7)


class SessionMachine(RuleBasedStateMachine):
    """Lets events happen, in turn or not; every fault is a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(0, PROFILE)
        self.clock = self.world.clock

    @rule(count=st.integers(1, 20))
    def go_on(self, count: int) -> None:
        self.world.run(count)

    @rule(position=POSITIONS)
    def overtake(self, position: int) -> None:
        planned = self.clock.find("")
        self.clock.hurry(planned[position % len(planned)])

    @precondition(lambda self: self.clock.find(ARRIVAL))
    @rule(position=POSITIONS)
    def drop(self, position: int) -> None:
        messages = self.clock.find(ARRIVAL)
        self.clock.drop(messages[position % len(messages)])

    @precondition(lambda self: self.clock.find(ARRIVAL))
    @rule(position=POSITIONS, seconds=st.sampled_from([0.0, 1.0, 100.0]))
    def copy(self, position: int, seconds: float) -> None:
        messages = self.clock.find(ARRIVAL)
        _, _, arrive, arguments = messages[position % len(messages)]
        self.clock.plan(self.clock.now + seconds, arrive, *arguments)

    @rule(seconds=st.sampled_from([0.01, 1.0, 3.0, 30.0, 61.0]))
    def be_slow(self, seconds: float) -> None:
        """All that was due meanwhile happens after it."""
        self.clock.now += seconds
        for caller in self.world.callers:
            caller.wake()  # it was slow as well, and cannot blame its host

    @rule(kind=st.sampled_from(FAULTS))
    def fail(self, kind: str) -> None:
        strike(self.world, kind)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.finish()


@pytest.fixture
def quiet_sessions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "envserve")


@pytest.mark.usefixtures("quiet_sessions")
def test_no_sequence_of_events_makes_a_wrong_transition() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=hypothesis.settings(
            max_examples=40,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
