"""A client session over a real connection, without a lane and its threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from envserve.client.link.connection import Connection
from envserve.client.link.session_driver import SessionDriver
from envserve.lane import Outcome, Reset
from envserve.session.client.liveness import Timeouts
from envserve.session.states import ClientState
from envserve.wire.bodies import Attach
from tests.envserve.server_process import LEDGER
from tests.envserve.session_fakes import SingleLeaseSession


class SessionClient:
    """Drives a client session that ends when it loses its lease."""

    def __init__(
        self,
        address: str,
        num_envs: int = 4,
        env_name: str = LEDGER,
        *,
        session: int = 5,
        client_name: str = "",
        **changes: object,
    ) -> None:
        self.connection = Connection(address)
        attach = Attach(env_name=env_name, num_envs=num_envs, seed=1, **changes)  # type: ignore[arg-type]
        self.session = SingleLeaseSession(
            address,
            attach,
            Timeouts(connect_seconds=40.0),
            session=session,
            now=time.monotonic(),
            client_name=client_name,
        )
        self._driver = SessionDriver(self.session, self.connection)
        self.wait_for(lambda: self.session.state is ClientState.READY or self.is_over)

    @property
    def is_over(self) -> bool:
        return self.session.state.is_over

    def reset(self) -> list[Outcome]:
        blocks = self.session.blocks
        self.session.submit_reset([Reset(b.index) for b in blocks], time.monotonic())
        return self.collect()

    def step(self, action: int) -> list[Outcome]:
        """Step all blocks; if the session is lost, the outcomes contain errors."""
        self.session.rows.action[0][:] = action
        blocks = range(len(self.session.blocks))
        self.session.submit_step(list(blocks), time.monotonic())
        return self.collect()

    def collect(self) -> list[Outcome]:
        outcomes: list[Outcome] = []

        def is_complete() -> bool:
            outcomes.extend(self.session.collect())
            return len(outcomes) == len(self.session.blocks)

        self.wait_for(is_complete)
        return outcomes

    def wait_for_end(self) -> str:
        """Wait until the session has ended, and return its error as text."""
        self.wait_for(lambda: self.is_over)
        return str(self.session.error)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 40
        self.pump()
        while not condition():
            assert time.monotonic() < give_up_at, repr(self.session)
            self._driver.wait(give_up_at)
            self.pump()

    def pump(self) -> None:
        self._driver.run(time.monotonic())

    def close(self) -> None:
        self.session.begin_close(time.monotonic())
        self.wait_for_end()
        self.connection.close(linger_seconds=0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
