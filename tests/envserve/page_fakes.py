"""Fake servers with envs, frames and faults, for page tests."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Sequence
from typing import Any, Self

from PIL import Image, ImageDraw

from envserve.errors import ConnectError, EnvserveError, LeaseLost
from envserve.lane import RenderedFrame
from envserve.wire.status import Histogram, LeaseStatus, ServerStatus

BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)


class FakeServerState:
    """The state of one server, which tests modify.

    Attributes:
      error: Exception that requests raise, or None.
      frame_requests: Lease, rows and width of every frame request.
      has_images: Whether frames contain images.
      ticks: Serial of the latest frames, minus one.
      status: The status that the server reports.
    """

    def __init__(
        self,
        *names: str,
        num_envs: int = 16,
        host: str = "sim1",
        has_images: bool = True,
    ) -> None:
        self.error: EnvserveError | None = None
        self.frame_requests: list[tuple[int, tuple[int, ...], int]] = []
        self.has_images = has_images
        self.ticks = 0
        self._lock = threading.Lock()
        self.status = ServerStatus(
            version="0.1.0",
            host=host,
            pid=4711,
            seconds=8040.0,
            num_workers=4,
            total_envs=2 * num_envs * len(names),
            free_envs=num_envs * len(names),
            loop_lag_ms=3,
            steps=1_204_000,
            rows={"OK": 1_204_000, "WORKER_DIED": 24, "TIMEOUT": 4},
            resets=9000,
            restarts=3,
            faults={"WORKER_DIED": 2, "TIMEOUT": 1},
            batch_seconds=histogram(3),
            env_step_seconds=histogram(1),
            reset_seconds=histogram(5),
            refusals={"BUSY": 2},
            num_leases=len(names),
            leases=tuple(
                LeaseStatus(
                    number=number,
                    user="anna",
                    client="anna (ppo)",
                    env_name=name,
                    num_envs=num_envs,
                    seconds=300.0,
                    steps=1_204_000,
                )
                for number, name in enumerate(names, start=1)
            ),
        )

    def replace(self, **fields: Any) -> None:
        """Replace fields of the server's status."""
        import msgspec

        with self._lock:
            self.status = msgspec.structs.replace(self.status, **fields)

    def replace_lease(self, place: int, **fields: Any) -> None:
        import msgspec

        with self._lock:
            leases = list(self.status.leases)
            leases[place] = msgspec.structs.replace(leases[place], **fields)
            self.status = msgspec.structs.replace(self.status, leases=tuple(leases))

    def end_episodes(self, place: int, *returns: float) -> None:
        lease = self.status.leases[place]
        first = lease.num_episodes + 1
        ended = tuple(
            (serial, serial % lease.num_envs, value, int(value))
            for serial, value in enumerate(returns, start=first)
        )
        self.replace_lease(
            place,
            episodes=(*lease.episodes, *ended)[-256:],
            num_episodes=lease.num_episodes + len(ended),
        )


def histogram(peak: int) -> Histogram:
    counts = [int(1000 * math.exp(-((k - peak) ** 2))) for k in range(len(BOUNDS) + 1)]
    return Histogram(bounds=BOUNDS, counts=tuple(counts), sum=1.0)


class FakeObserver:
    """An `Observer` of a `FakeServerState`."""

    def __init__(self, server: FakeServerState) -> None:
        self.server = server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self, timeout: float) -> ServerStatus:
        if self.server.error:
            raise self.server.error
        return self.server.status

    def frames(
        self,
        lease: int,
        rows: Sequence[int],
        width: int,
        timeout: float,
        after: Sequence[int] = (),
    ) -> list[RenderedFrame]:
        server = self.server
        if server.error:
            raise server.error
        if lease not in {each.number for each in server.status.leases}:
            raise LeaseLost(f"there is no lease {lease}")
        server.frame_requests.append((lease, tuple(rows), width))
        return [
            draw_frame(row, server.ticks, width, has_jpeg=server.has_images)
            for row, serial in zip(rows, after, strict=True)
            if serial <= server.ticks
        ]

    def record(self, lease: int, row: int, timeout: float) -> bytes:
        if row == 13:
            raise ConnectError("env 13 has no flight record: it was just built")
        return b"record of %d %d" % (lease, row)


def draw_frame(row: int, tick: int, width: int, *, has_jpeg: bool) -> RenderedFrame:
    """Draw a cart with a pole, whose position depends on the row and the tick."""
    angle, x = 0.3 * math.sin(tick / 7 + row), 0.2 * math.sin(tick / 11 + 2 * row)
    height = width * 2 // 3
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    middle, ground = width * (0.5 + x), height * 0.75
    pen.line((0, ground, width, ground), "black")
    pen.rectangle((middle - width / 12, ground - 8, middle + width / 12, ground + 8), 0)
    top = (middle + height / 2 * math.sin(angle), ground - height / 2 * math.cos(angle))
    pen.line((middle, ground, *top), "#ca9865", max(3, width // 40))
    file = io.BytesIO()
    image.save(file, "JPEG")
    return RenderedFrame(
        row=row,
        serial=tick + 1,
        jpeg=file.getvalue() if has_jpeg else b"",
        text="" if has_jpeg else "no image: render_mode is None",
        seed=2**60 + row,
        episode_steps=tick % 500,
        episode_return=float(tick % 500),
    )
