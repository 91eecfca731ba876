"""The parameters of a simulation, drawn from its seed; some seeds have no faults.

Each seed omits about half of the fault kinds, because a frequent fault can hide bugs
that occur without it.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, field
from typing import Final

#: Kinds of faults; see `faults.inject_fault`.
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
    "fail_message",
    "send_stray",
)


def log_uniform(source: random.Random, low: float, high: float) -> float:
    """Return a log-uniformly distributed number between two positive ones."""
    return low * math.exp(source.random() * math.log(high / low))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Numbers and probabilities of a simulation; durations are in seconds."""

    num_hosts: int = 1
    num_clients: int = 2
    num_trainers: int = 0
    #: Number of workers per lease and number of envs per worker; their product is a
    #: host's capacity.
    num_workers: int = 2
    envs_per_worker: int = 4
    lease_seconds: float = 60.0
    #: Probability that a message is lost.
    loss: float = 0.0
    #: Probability that a message is duplicated.
    copies: float = 0.0
    #: Maximum delay of a message.
    max_delay: float = 0.01
    #: Exponent of the delay distribution; 1 is uniform, higher values make most delays
    #: short.
    delay_power: int = 8
    #: Typical duration of a step, and of the pause between steps.
    pace: float = 0.01
    #: Probability of a fault at each event, and the relative weight of each kind.
    fault_rate: float = 0.0
    faults: dict[str, float] = field(default_factory=dict)
    #: Probability that an env fails in a step, and that a whole operation fails.
    env_errors: float = 0.0
    failures: float = 0.0
    #: Maximum duration of a pause or cut.
    max_outage: float = 100.0
    #: Whether messages survive the connection over which they were sent.
    is_sticky: bool = False
    #: Maximum duration of an operation, see `Timeouts`.
    operation_seconds: float = 3600.0

    @classmethod
    def draw(cls, source: random.Random) -> Profile:
        draw = source.random
        faults = {kind: draw() for kind in FAULTS if draw() < 0.5}
        has_long_delays = draw() < 0.3  # a few messages are minutes late
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
            if has_long_delays
            else log_uniform(source, 1e-4, 1.0),
            delay_power=source.choice((16, 32) if has_long_delays else (1, 4)),
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

    def without_faults(self) -> Profile:
        """Return a profile with the same hosts and clients, but without faults."""
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


#: Messages are duplicated, and arrive up to a minute later, even after a reconnect.
LINGERING: Final = Profile(
    num_clients=2, copies=0.5, max_delay=60.0, delay_power=8, is_sticky=True, pace=0.1
)
#: Rows move between hosts that still reply; the hosts also crash and restart.
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
#: Servers that reply to PING, but ignore operations or never finish them. With this
#: loss, it is practically impossible that the network alone has the same effect.
FAULTY: Final = Profile(
    num_hosts=2,
    copies=0.2,
    loss=0.02,
    max_delay=30.0,
    delay_power=16,
    pace=0.1,
    fault_rate=0.003,
    faults={"mute_host": 3.0, "hang_host": 2.0, "move": 0.5, "crash_host": 0.2},
    max_outage=300.0,
    operation_seconds=150.0,
)
#: Batches whose workers and servers are temporarily unavailable.
BATCHES: Final = Profile(
    num_hosts=2,
    num_clients=0,
    num_trainers=2,
    fault_rate=0.01,
    faults={"pause_host": 3.0, "lose_worker": 2.0, "crash_host": 0.5},
    max_outage=15.0,
)
