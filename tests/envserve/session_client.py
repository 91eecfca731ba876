"""A client's session over a real connection, without all that a lane does for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from envserve.client.connection import Connection
from envserve.lane import Outcome, Reset
from envserve.session import ClientState
from envserve.wire import Attach
from tests.envserve.server_process import LEDGER
from tests.envserve.session_fakes import OneLease


class SessionClient:
    """Attaches, steps, and hears of the end; never attaches anew."""

    def __init__(
        self,
        address: str,
        num_envs: int = 4,
        env_name: str = LEDGER,
        *,
        session: int = 5,
        client: str = "",
        **changes: object,
    ) -> None:
        self.connection = Connection(address)
        attach = Attach(env_name=env_name, num_envs=num_envs, seed=1, **changes)  # type: ignore[arg-type]
        self.session = OneLease(
            address,
            attach,
            session=session,
            now=time.monotonic(),
            timeout_seconds=20.0,
            client=client,
        )
        self.wait_for(
            lambda: self.session.state is ClientState.READY or self.is_over,
        )

    @property
    def is_over(self) -> bool:
        return self.session.state.is_over

    def reset(self) -> list[Outcome]:
        blocks = self.session.blocks
        self.session.submit_reset([Reset(b.index) for b in blocks], time.monotonic())
        return self.collect()

    def step(self, action: int) -> list[Outcome]:
        """The outcomes; those of a session that is lost have an error."""
        self.session.rows.action[0][:] = action
        blocks = range(len(self.session.blocks))
        self.session.submit_step(list(blocks), time.monotonic())
        return self.collect()

    def collect(self) -> list[Outcome]:
        finished: list[Outcome] = []
        while len(finished) < len(self.session.blocks):
            self.wait_for(lambda: self.session.has_finished)
            finished += self.session.take_finished()
        return finished

    def wait_for_end(self) -> None:
        self.wait_for(lambda: self.is_over)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < give_up_at, repr(self.session)
            self.pump()
            if not condition():
                wants_to_send = self.session.state is ClientState.CONNECTING
                self.connection.wait(0.05, for_writing=wants_to_send)
        self.pump()

    def pump(self) -> None:
        now = time.monotonic()
        while (frames := self.connection.receive()) is not None:
            self.session.receive(frames, now)
        is_connecting = self.session.state is ClientState.CONNECTING
        if is_connecting and self.connection.is_writable():
            self.session.connected(now)
        self.session.advance(now)
        while (outgoing := self.session.outbox.first()) is not None:
            if not self.connection.send(outgoing):
                return
            self.session.outbox.pop()

    def close(self) -> None:
        self.session.begin_close(time.monotonic())
        self.wait_for_end()
        self.connection.close(linger_seconds=0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
