"""A worker over its socket: built, stepped, reset, called, and never silent."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envserve.crashes.action_ring import ring_nbytes
from envserve.lane import Block, Fault
from envserve.slab import Slab, Status, row_of_beat
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec, restore
from envserve.worker import process
from envserve.worker.attribute_calls import call_payload, read_answer
from envserve.worker.channel import ChannelMessage, Kind, MessageDecoder, pack_message
from envserve.worker.frame_board import board_nbytes
from envserve.worker.worker_report import max_report

from .session_fakes import make_call

LEDGER = "envserve/Ledger-v0"
FAULTY = "envserve/Faulty-v0"
SEED = 5


class Hosted:
    """A worker that runs in a thread of this process; the test plays the pool."""

    def __init__(self, env_name: str, rows: int = 2, **build: Any) -> None:
        self.num_rows = rows
        self.num_bytes = 0  # of the longest answer
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60.0)
        self._reader = MessageDecoder()
        self._frames: list[ChannelMessage] = []
        self._sequence = 0
        self._thread = threading.Thread(
            target=process.run, args=(theirs, ""), daemon=True
        )
        self._thread.start()
        message = {
            "env_name": env_name,
            "env_kwargs": {},
            "wrappers": [],
            "num_envs": rows,
            "num_workers": 1,
            "worker": 0,
            "seed": SEED,
            "first_env_index": 0,
            "autoreset": "same_step",
            "infos": "none",
            "max_infos_kib": 64,
            "spare_envs": False,
            "vectorized": False,
            "nonfinite": "raise",
            "strict_spaces": False,
            "seeded": True,
            "blocks": [[0, 0, rows]],
            "incarnations": [0] * rows,
        }
        self.send(Kind.BUILD, codec.encode(message | build))

    def send(self, kind: Kind, payload: bytes = b"", block: int = 0) -> None:
        self._sequence += 1
        self._socket.sendall(pack_message(kind, block, self._sequence, payload))

    def receive(self) -> ChannelMessage:
        while not self._frames:
            data = self._socket.recv(1 << 16)
            assert data, "the worker has closed its socket"
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def start(self) -> Hosted:
        frames = [self.receive() for _ in range(self.num_rows + 1)]
        kinds = [Kind.BUILT] * self.num_rows + [Kind.READY]
        assert [frame.kind for frame in frames] == kinds
        described = codec.decode(frames[-1].payload, max_bytes=1 << 24)
        self.spec = EnvSpec(
            "A-v0", restore(described["observation"]), restore(described["action"])
        )
        nbytes = ring_nbytes(self.spec, self.num_rows) + board_nbytes(self.num_rows, 1)
        self.slab = Slab.create(self.spec, self.num_rows, 1, nbytes)
        self.rows = self.slab.rows
        socket.send_fds(self._socket, [pack_message(Kind.SLAB)], [self.slab.fd])
        return self

    def ready(self) -> Hosted:
        self.start()
        assert self.ask(Kind.RESET) is None
        return self

    def ask(self, kind: Kind, request: dict[str, Any] | None = None) -> Any:
        self.send(kind, codec.encode(request) if request else b"")
        frame = self.receive()
        assert (frame.kind, frame.block) == (Kind.DONE, 0)
        assert frame.sequence == self._sequence
        self.num_bytes = max(self.num_bytes, len(frame.payload))
        return codec.decode(frame.payload, max_bytes=1 << 26) if frame.payload else None

    def step(self, *actions: Any) -> Any:
        self.rows.action[0][:] = actions
        return self.ask(Kind.STEP)

    def call(self, kind: str, name: str, *arguments: Any) -> Sequence[Fault]:
        self.send(Kind.CALL, call_payload(make_call([1], kind, name, *arguments)))
        block = Block(0, 0, self.num_rows, 0, 0)
        return read_answer(self.receive().payload, block).faults

    def end(self) -> None:
        """Hangs up, and waits until the worker has gone."""
        self._socket.close()
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        if hasattr(self, "slab"):
            self.slab.close()


Host = Callable[..., Hosted]


@pytest.fixture
def host() -> Iterator[Host]:
    hosted: list[Hosted] = []

    def start(*arguments: Any, **build: Any) -> Hosted:
        hosted.append(Hosted(*arguments, **build))
        return hosted[-1]

    yield start
    for each in hosted:
        each.end()
    gc.unfreeze()


def test_every_env_call_beats_and_only_slow_ones_raise_the_flag(host: Host) -> None:
    hosted = host(LEDGER).start()
    beats = [hosted.slab.heartbeats[0, :2].tolist()]
    for kind in (Kind.RESET, Kind.STEP):
        hosted.ask(kind)
        beats.append(hosted.slab.heartbeats[0, :2].tolist())
    assert len({beat for beat, _ in beats}) == 3
    assert [row_of_beat(beat) for beat, _ in beats] == [None, 1, 1]
    assert [is_slow for _, is_slow in beats] == [0, 0, 0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [[{0, 1}], [{0, 1}], [{0, 1}]]),
        ("episode_end", [[], [], [{0, 1}]]),
        ("none", [[], [], []]),
    ],
)
def test_infos_are_reported_as_asked_for(host: Host, mode: str, expected: Any) -> None:
    hosted = host(LEDGER, env_kwargs={"length": 2}, infos=mode).start()
    reports = [hosted.ask(Kind.RESET), hosted.step(0, 0), hosted.step(0, 0)]
    assert [[set(r["infos"])] if r else [] for r in reports] == expected
    if mode != "none":
        info = reports[-1]["infos"][1]
        assert info["step"] == 2
        assert info["weights"].tolist() == [2.0, 2.0]
        assert info["reset_info"] == {"reset_of_episode": 1}


def test_reports_have_a_bound(host: Host) -> None:
    class LongEnv(KeepingEnv):
        def step(self, action: Any) -> Any:
            if action[0]:
                raise RuntimeError("\N{PILE OF POO}" * 50_000)
            return action, 0.0, False, False, infos[action[1]]

    infos = [
        {"lists": [[1] * 60_000] * 3},
        {f"{number:070000}": 1 for number in range(10)},
        {"n": bytes(30_000)},
        {"lists": [[]] * 10_000},
    ]
    gymnasium.register("Long-v0", lambda **_: LongEnv())
    try:
        hosted = host("Long-v0", infos="all").ready()
        limit = max_report(2, 64)
        omitted = {"omitted": ["lists"]}
        assert hosted.step([0, 0], [0, 0])["infos"] == {0: omitted, 1: omitted}
        both = hosted.step([0, 3], [0, 3])["infos"]
        assert both == {0: omitted, 1: infos[3]}
        cut = hosted.step([0, 1], [0, 1])["infos"]
        assert [len(info["omitted"]) for info in cut.values()] == [10, 10]
        assert all(len(name) == 32 for name in cut[0]["omitted"])
        assert set(hosted.step([0, 2], [0, 2])["infos"][0]) == {"n"}
        faults = [Fault(*each) for each in hosted.step([1, 0], [1, 0])["faults"]]
        assert len(faults) == 2
        assert all(len(fault.text.encode()) <= limit / 4 for fault in faults)
        assert hosted.num_bytes <= limit
    finally:
        del gymnasium.registry["Long-v0"]


@pytest.mark.parametrize("fault", ["nan", "inf_reward", "wrong_shape", "wrong_dtype"])
def test_violation_of_the_spaces_is_left_to_the_pool(host: Host, fault: str) -> None:
    hosted = host(FAULTY, env_kwargs={"fault": fault}).ready()
    hosted.step(0, 0)
    (reported,) = hosted.step(0, 1)["faults"]
    assert Fault(*reported).env_index == 1
    assert Fault(*reported).is_violation is True
    rows = hosted.rows
    assert list(rows.status) == [Status.OK, Status.PENDING]
    assert rows.reward[0] == 1.0
    assert rows.observation[0].tolist() == [[2, 2, 2], [0, 0, 0]]
    assert np.isfinite(rows.final_observation[0]).all()
    assert hosted.step(0, 0) is None
    assert rows.observation[0].tolist() == [[3, 3, 3], [1, 1, 1]]


class KeepingEnv(gymnasium.Env[Any, Any]):
    """Keeps every action that it is given, and observes the first."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = spaces.Box(0, 9, (2,), np.int64)
        self.kept: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.int64), {}

    def step(self, action: Any) -> Any:
        self.kept.append(action)
        return self.kept[0], 0.0, False, False, {}


class OwnWordsEnv(KeepingEnv):
    def step(self, action: Any) -> Any:
        return action, 0.0, True, False, {"reset_info": 5}


def test_an_env_has_no_reset_info_of_its_own(host: Host) -> None:
    gymnasium.register("OwnWords-v0", lambda **_: OwnWordsEnv())
    try:
        hosted = host("OwnWords-v0", infos="all").ready()
        infos = hosted.step([0, 0], [0, 0])["infos"]
    finally:
        del gymnasium.registry["OwnWords-v0"]
    assert infos == {0: {"reset_info": {}}, 1: {"reset_info": {}}}


@pytest.fixture
def keeping_env() -> Iterator[str]:
    gymnasium.register("Keeping-v0", lambda **_: KeepingEnv())
    yield "Keeping-v0"
    del gymnasium.registry["Keeping-v0"]


def test_action_that_an_env_keeps_never_changes(host: Host, keeping_env: str) -> None:
    hosted = host(keeping_env).ready()
    hosted.step([1, 2], [3, 4])
    hosted.step([5, 6], [7, 8])
    assert hosted.rows.observation[0].tolist() == [[1, 2], [3, 4]]


# Calls.


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("complain", ["too loud"], "ValueError: too loud"),
        ("no_such_thing", [], "AttributeError"),
        ("_observation", [1], "TypeError"),
        ("action_space", [], "no plain form for a value of type Discrete"),
    ],
)
def test_call_that_fails_gives_the_traceback_and_costs_nothing(
    host: Host, name: str, arguments: list[Any], text: str
) -> None:
    hosted = host(LEDGER).ready()
    (fault,) = hosted.call("call", name, *arguments)
    assert fault.env_index == 1
    assert text in fault.text
    assert hosted.step(1, 1) is None


# The end of the worker.


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.BUILD])
def test_frame_that_is_no_operation_ends_the_worker(host: Host, kind: Kind) -> None:
    hosted = host(LEDGER).start()
    hosted.send(kind)
    failed = hosted.receive()
    assert failed.kind is Kind.FAILED
    assert "expected an operation on a block" in failed.payload.decode()


class ClosingEnv(gymnasium.Env[Any, Any]):
    """Counts how often it was closed; the first one fails to."""

    observation_space = action_space = spaces.Discrete(2)
    closed = 0

    def close(self) -> None:
        ClosingEnv.closed += 1
        if ClosingEnv.closed == 1:
            raise RuntimeError("the window is gone")


def test_nobody_looks_and_an_operation_reads_one_number_for_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    class Until:
        def __getitem__(self, index: int) -> int:
            reads.append(index)
            return 0

    monkeypatch.setattr(
        process, "FrameRenderer", lambda *_: SimpleNamespace(until=Until())
    )
    hosted = host(LEDGER).ready()  # by a reset
    for _ in range(10):
        hosted.step(0, 0)
    hosted.end()
    assert reads == [0] * 11


@pytest.mark.parametrize("is_told", [True, False], ids=["CLOSE", "end of file"])
def test_envs_are_closed_if_the_pool_says_so_or_goes(host: Host, is_told: bool) -> None:
    gymnasium.register("Closing-v0", lambda **_: ClosingEnv())
    ClosingEnv.closed = 0
    try:
        hosted = host("Closing-v0", 3).start()
        if is_told:
            hosted.send(Kind.CLOSE)
        hosted.end()
    finally:
        del gymnasium.registry["Closing-v0"]
    assert ClosingEnv.closed == 3
