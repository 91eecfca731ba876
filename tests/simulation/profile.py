"""What one simulation is like; every seed has another mixture, some without faults.

Half of all kinds of faults are left out each time: a fault that is always near hides
what happens when it is not.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, field
from typing import Final

#: Each is carried out by `faults.strike`.
FAULTS: Final = (
    "crash_host",
    "pause_host",
    "stop_host",
    "drain_host",
    "pause_client",
    "kill_client",
    "close_client",
    "reset_link",
    "cut_link",
    "cut_one_way",
    "lose_worker",
    "fail_pool",
    "break_pool",
    "meet_defect",
    "send_stray",
)


def log_uniform(source: random.Random, low: float, high: float) -> float:
    """Returns a number between two that are positive, all magnitudes alike."""
    return low * math.exp(source.random() * math.log(high / low))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Numbers and probabilities of a simulation. Durations are in seconds."""

    num_hosts: int = 1
    num_clients: int = 2
    num_trainers: int = 0
    #: Processes per lease, and what they may hold; with that, the hosts' capacity.
    num_workers: int = 2
    envs_per_worker: int = 4
    lease_seconds: float = 60.0
    #: Probability that a message is lost.
    loss: float = 0.0
    #: Probability that it comes once more.
    copies: float = 0.0
    #: Longest that a message is under way.
    max_delay: float = 0.01
    #: How steeply delays fall below that; 1 for all alike.
    delay_power: int = 8
    #: Typical time for a step, and between steps.
    pace: float = 0.01
    #: Probability of a fault at an event, and of each kind of it.
    fault_rate: float = 0.0
    faults: dict[str, float] = field(default_factory=dict)
    #: Probability that an env fails at a step; that an operation does.
    env_errors: float = 0.0
    failures: float = 0.0
    #: Longest pause or cut.
    max_outage: float = 100.0
    #: Whether messages survive the connection that they were sent over.
    is_sticky: bool = False

    @classmethod
    def draw(cls, source: random.Random) -> Profile:
        draw = source.random
        faults = {kind: draw() for kind in FAULTS if draw() < 0.5}
        has_minutes = draw() < 0.3  # then some messages are so late, and most are not
        num_trainers = source.choice((0, 0, 1, 2))
        return cls(
            num_hosts=source.choice((1, 2, 2) if num_trainers else (1, 1, 2)),
            num_clients=0 if num_trainers else source.choice((1, 2, 3)),
            num_trainers=num_trainers,
            envs_per_worker=source.choice((2, 3, 4)),
            lease_seconds=source.choice((10.0, 60.0)),
            loss=draw() * source.choice((0.0, 0.02, 0.3)),
            copies=draw() * source.choice((0.0, 0.05, 0.5)),
            max_delay=log_uniform(source, 1.0, 300.0)
            if has_minutes
            else log_uniform(source, 1e-4, 1.0),
            delay_power=source.choice((16, 32) if has_minutes else (1, 4)),
            pace=log_uniform(source, 1e-3, 1.0),
            fault_rate=log_uniform(source, 3e-4, 0.02) if faults else 0.0,
            faults=faults,
            env_errors=source.choice((0.0, 0.02)),
            failures=source.choice((0.0, 0.0, 0.005)),
            max_outage=log_uniform(source, 1.0, 150.0),
            is_sticky=draw() < 0.3,
        )

    @property
    def total_envs(self) -> int:
        return self.num_workers * self.envs_per_worker

    def calmed(self) -> Profile:
        """Returns the same hosts and clients, where nothing fails."""
        return dataclasses.replace(
            self,
            loss=0.0,
            copies=0.0,
            max_delay=0.01,
            pace=0.01,
            fault_rate=0.0,
            faults={},
            env_errors=0.0,
            failures=0.0,
        )


#: Messages that come again, and minutes later, whatever has become of the connection.
LINGERING: Final = Profile(
    num_clients=2, copies=0.5, max_delay=60.0, delay_power=8, is_sticky=True, pace=0.1
)
#: Rows that move from host to host, which still answer, and come and go themselves.
MOVES: Final = Profile(
    num_hosts=3,
    copies=0.5,
    loss=0.02,
    max_delay=30.0,
    delay_power=16,
    is_sticky=True,
    pace=0.1,
    fault_rate=0.02,
    faults={"move": 4.0, "crash_host": 0.5, "pause_host": 0.5, "drain_host": 0.5},
)
#: Batches of which envs and servers are away every now and then.
BATCHES: Final = Profile(
    num_hosts=2,
    num_clients=0,
    num_trainers=2,
    fault_rate=0.01,
    faults={"pause_host": 3.0, "lose_worker": 2.0, "crash_host": 0.5},
    max_outage=15.0,
)
