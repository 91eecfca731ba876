"""A client session as a lane; while a call blocks, the simulation continues."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from envserve.errors import ConnectError, EnvserveError
from envserve.lane import Block, Call, Outcome, Reset
from envserve.session.client.client_session import ClientSession
from envserve.session.states import ClientState
from envserve.slab import Rows
from envserve.spaces.env_spec import EnvSpec
from envserve.wire.bodies import Attach
from tests.simulation.endpoint import Endpoint
from tests.simulation.host import Host

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

#: Maximum virtual seconds that pass in a `collect` that does not wait.
_LOOK_SECONDS: Final = 0.1
_CLOSE_SECONDS: Final = 1.5


class SimulatedLane(Endpoint):
    """Implements `envserve.lane.Lane` over a simulated session.

    Attributes:
      reset_blocks: Indices of blocks that were reset since `watch_reset`.
      has_given_up: Whether the session has given up at any time since `watch_reset`.
    """

    def __init__(self, simulation: Simulation, host: Host, attach: Attach) -> None:
        super().__init__(simulation)
        self.reset_blocks: set[int] = set()
        self.has_given_up = False
        self._resetting: set[int] = set()
        self.name = f"host {simulation.hosts.index(host)}"
        self._reader, self._writer = os.pipe()
        os.write(self._writer, b"!")  # always readable, so that no call blocks on it
        self.attach(host, attach)

    def finish_start(self, deadline: float) -> None:
        client = self._client
        while client.state is not ClientState.READY:
            if client.error is not None or self.clock.now >= deadline:
                self.close()
                raise client.error or ConnectError("no envs in time")
            self.simulation.step(deadline)

    @property
    def _client(self) -> ClientSession:
        assert self.session is not None
        return self.session

    @property
    def spec(self) -> EnvSpec:
        return self._client.client_blocks.spec

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self._client.blocks

    @property
    def rows(self) -> Rows:
        return self._client.rows

    @property
    def is_busy(self) -> bool:
        return self._client.num_in_flight > 0

    @property
    def absent(self) -> Collection[int]:
        return self._client.client_blocks.absent

    @property
    def give_up_error(self) -> EnvserveError | None:
        return self._client.give_up_error

    def submit_step(self, blocks: Sequence[int]) -> None:
        self._client.submit_step(blocks, self.clock.now)
        self.update()

    def watch_reset(self) -> None:
        """Prepare `reset_blocks` and `has_given_up` for the next reset of the batch."""
        self.reset_blocks.clear()
        self.has_given_up = self.give_up_error is not None

    def _after_event(self, session: ClientSession) -> None:
        if session.attachment.client_blocks is None:
            return
        finished = self._resetting & session.client_blocks.uncollected
        self._resetting -= finished
        if session.give_up_error is None:
            self.reset_blocks |= finished
        else:
            self.has_given_up = True

    def submit_reset(self, resets: Sequence[Reset]) -> None:
        self._resetting = {reset.block for reset in resets}
        self._client.submit_reset(resets, self.clock.now)
        self.update()

    def submit_call(self, calls: Sequence[Call]) -> None:
        self._client.submit_call(calls, self.clock.now)
        self.update()

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Run the simulation until `min_finished` operations have finished."""
        operations = self._client.client_blocks
        until = self.clock.now + (timeout_seconds or _LOOK_SECONDS)
        while not operations.is_ready(min_finished) and self.clock.now < until:
            self.simulation.step(until)
            if timeout_seconds <= 0:
                break
        operations.is_ready(min_finished)
        return self._client.collect()

    def invalidate(self, text: str) -> None:
        """Release the envs and attach again; drop operations in flight."""
        self._client.invalidate(text, self.clock.now)
        self.update()

    def stats(self) -> Mapping[str, int]:
        return self._client.stats()

    def fileno(self) -> int:
        return self._reader

    def begin_close(self) -> None:
        self._client.begin_close(self.clock.now)
        self.update()

    def close(self) -> None:
        """Detach, and wait a moment for the reply."""
        if self.session is None:
            return
        self.begin_close()
        until = self.clock.now + _CLOSE_SECONDS
        while self._client.state is ClientState.CLOSING and self.clock.now < until:
            self.simulation.step(until)
        self.simulation.unregister(self)
        self.session = None
        os.close(self._reader)
        os.close(self._writer)
