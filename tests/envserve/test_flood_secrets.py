"""A server does not reveal its secrets to a flood of bad messages."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

from envserve.keys.key_folder import KeyFolder
from scripts import flood_frames
from tests.envserve.conftest import Serve

NUM_MESSAGES = 2_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_flood_neither_contains_nor_reveals_a_secret(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVSERVE_HOME", str(tmp_path / "home"))
    planted = {"ENVSERVE_PLANTED": flood_frames._PLANTED}
    server = serve("--log-level", "debug", environment=planted)
    sent: list[bytes] = []
    send = flood_frames.Peer.send

    def record(peer: flood_frames.Peer, frames: Any) -> None:
        sent.extend(map(bytes, frames))
        send(peer, frames)

    monkeypatch.setattr(flood_frames.Peer, "send", record)
    assert flood_frames.send_bad(server.address, NUM_MESSAGES, 1)
    assert len(sent) > NUM_MESSAGES
    secrets = flood_frames.planted_secrets(KeyFolder())
    assert len(secrets) == 5
    places = [("sent messages", b"\0".join(sent))]
    places += flood_frames.places_of(server, tmp_path / "core-0")
    with contextlib.suppress(PermissionError):
        environment = Path(f"/proc/{server.process.pid}/environ").read_bytes()
        # The secret may appear only in the environment variable that the test has set.
        assert flood_frames._PLANTED.encode() in environment
        clean = environment.replace(flood_frames._PLANTED.encode(), b"")
        places.append(("environment of the server", clean))
    assert len(places) > 5
    assert not [
        f"{name} in {place}"
        for place, data in places
        for name, secret in secrets.items()
        if secret in data
    ]
