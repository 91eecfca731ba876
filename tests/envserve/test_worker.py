"""A worker builds, steps, resets and calls envs, and always replies."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envserve.crashes.action_ring import ring_nbytes
from envserve.lane import Block, Fault
from envserve.slab import FIRST_STEP, Slab, Status, row_of_beat
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec, restore
from envserve.worker import process
from envserve.worker.attribute_calls import decode_results, encode_call
from envserve.worker.channel import (
    ChannelMessage,
    MessageDecoder,
    MessageKind,
    pack_message,
)
from envserve.worker.frame_board import board_nbytes
from envserve.worker.worker_report import decode_report, max_report_bytes

from .session_fakes import make_call

LEDGER = "envserve/Ledger-v0"
FAULTY = "envserve/Faulty-v0"
SEED = 5


class WorkerThread:
    """A worker in a thread; the test acts as its pool."""

    def __init__(self, env_name: str, rows: int = 2, **build: Any) -> None:
        self.num_rows = rows
        self.num_bytes = 0  # of the longest reply
        self.block = Block(0, 0, rows, 0, 0)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60.0)
        self._reader = MessageDecoder()
        self._messages: list[ChannelMessage] = []
        self._sequence = 0
        self._thread = threading.Thread(target=process.run, args=(theirs,), daemon=True)
        self._thread.start()
        message = {
            "env_name": env_name,
            "env_kwargs": {},
            "pickled_code": b"",
            "wrappers": [],
            "num_envs": rows,
            "num_workers": 1,
            "worker": 0,
            "gpu": "",
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
        self.send(MessageKind.BUILD, codec.encode(message | build))

    def send(self, kind: MessageKind, payload: bytes = b"", block: int = 0) -> None:
        self._sequence += 1
        self._socket.sendall(pack_message(kind, block, self._sequence, payload))

    def receive(self) -> ChannelMessage:
        while not self._messages:
            data = self._socket.recv(1 << 16)
            assert data, "the worker has closed its socket"
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    def start(self) -> WorkerThread:
        frames = [self.receive() for _ in range(self.num_rows + 1)]
        kinds = [MessageKind.BUILT] * self.num_rows + [MessageKind.READY]
        assert [frame.kind for frame in frames] == kinds
        described = codec.decode(frames[-1].payload, max_bytes=1 << 24)
        self.spec = EnvSpec(
            "A-v0", restore(described["observation"]), restore(described["action"])
        )
        nbytes = ring_nbytes(self.spec, self.num_rows) + board_nbytes(self.num_rows, 1)
        self.slab = Slab.create(self.spec, self.num_rows, 1, nbytes)
        self.rows = self.slab.rows
        socket.send_fds(self._socket, [pack_message(MessageKind.SLAB)], [self.slab.fd])
        return self

    def start_and_reset(self) -> WorkerThread:
        self.start()
        assert self.request(MessageKind.RESET) is None
        return self

    def request(self, kind: MessageKind, fields: dict[str, Any] | None = None) -> Any:
        self.send(kind, codec.encode(fields) if fields else b"")
        frame = self.receive()
        assert (frame.kind, frame.block) == (MessageKind.DONE, 0)
        assert frame.sequence == self._sequence
        self.num_bytes = max(self.num_bytes, len(frame.payload))
        return codec.decode(frame.payload, max_bytes=1 << 26) if frame.payload else None

    def step(self, *actions: Any) -> Any:
        self.rows.action[0][:] = actions
        return self.request(MessageKind.STEP)

    def infos(self, kind: MessageKind) -> Mapping[int, Mapping[str, Any]]:
        """Return the infos of an operation; all actions of a step are 0."""
        self.send(kind)
        payload = self.receive().payload
        return decode_report(payload, self.block, 64)[0].infos if payload else {}

    def call(self, kind: str, name: str, *arguments: Any) -> Sequence[Fault]:
        self.send(MessageKind.CALL, encode_call(make_call([1], kind, name, *arguments)))
        return decode_results(self.receive().payload, self.block).faults

    def close(self) -> None:
        """Close the socket, and wait until the worker has finished."""
        self._socket.close()
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        if hasattr(self, "slab"):
            self.slab.close()


StartWorker = Callable[..., WorkerThread]


@pytest.fixture
def start_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartWorker]:
    monkeypatch.setattr(gc, "freeze", lambda: None)  # it affects the whole process
    worker: list[WorkerThread] = []

    def start(*arguments: Any, **build: Any) -> WorkerThread:
        worker.append(WorkerThread(*arguments, **build))
        return worker[-1]

    yield start
    for each in worker:
        each.close()


def test_every_env_call_changes_the_heartbeat_and_only_slow_ones_set_its_flag(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(LEDGER).start()
    beats = [worker.slab.heartbeats[0, :2].tolist()]
    for kind in (MessageKind.RESET, MessageKind.STEP):
        worker.request(kind)
        beats.append(worker.slab.heartbeats[0, :2].tolist())
    assert len({beat for beat, _ in beats}) == 3
    assert [row_of_beat(beat) for beat, _ in beats] == [None, 1, 1]
    assert [is_slow for _, is_slow in beats] == [0, 0, 0]


class MarkedEnv(gymnasium.Env[Any, Any]):
    """An env whose observation is the flag of the heartbeat during its step."""

    observation_space = action_space = spaces.Discrete(9)
    heartbeats: Any

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        if action:
            raise RuntimeError("no luck")
        return int(self.heartbeats[0, 1]), 0.0, False, False, {}


def test_only_the_first_step_after_a_deferred_reset_is_a_first_step(
    start_worker: StartWorker,
) -> None:
    """With autoreset "next_step", a step resets the env of a lost or failed row."""
    gymnasium.register("Marked-v0", lambda **_: MarkedEnv())
    try:
        worker = start_worker("Marked-v0", 1, autoreset="next_step").start()
        MarkedEnv.heartbeats = worker.slab.heartbeats
        worker.request(MessageKind.RESET, {"rows": []})
        marks = []
        for action in (0, 0, 0, 1, 0, 0, 0):
            worker.step(action)
            marks.append(int(worker.rows.observation[0][0]))
    finally:
        del gymnasium.registry["Marked-v0"]
    # The env fails in the fourth step, so the fifth one resets it.
    assert marks == [0, FIRST_STEP, 0, 0, 0, FIRST_STEP, 0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [[{0, 1}], [{0, 1}], [{0, 1}]]),
        ("episode_end", [[], [], [{0, 1}]]),
        ("none", [[], [], []]),
    ],
)
def test_infos_are_reported_as_configured(
    start_worker: StartWorker, mode: str, expected: Any
) -> None:
    worker = start_worker(LEDGER, env_kwargs={"length": 2}, infos=mode).start()
    kinds = MessageKind.RESET, MessageKind.STEP, MessageKind.STEP
    infos = [worker.infos(kind) for kind in kinds]
    assert [[set(each)] if each else [] for each in infos] == expected
    if mode != "none":
        info: Any = infos[-1][1]
        assert info["step"] == 2
        assert info["weights"].tolist() == [2.0, 2.0]
        assert info["reset_info"] == {"reset_of_episode": 1}


def test_reports_are_limited_in_size(start_worker: StartWorker) -> None:
    class LongEnv(StoringEnv):
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
        worker = start_worker("Long-v0", infos="all").start_and_reset()
        limit = max_report_bytes(2, 64)
        omitted = {"omitted": ["lists"]}
        assert worker.step([0, 0], [0, 0])["infos"] == {0: omitted, 1: omitted}
        both = worker.step([0, 3], [0, 3])["infos"]
        assert both == {0: omitted, 1: infos[3]}
        cut = worker.step([0, 1], [0, 1])["infos"]
        assert [len(info["omitted"]) for info in cut.values()] == [10, 10]
        assert all(len(name) == 32 for name in cut[0]["omitted"])
        assert set(worker.step([0, 2], [0, 2])["infos"][0]) == {"n"}
        faults = [Fault(*each) for each in worker.step([1, 0], [1, 0])["faults"]]
        assert len(faults) == 2
        assert all(len(fault.text.encode()) <= limit / 4 for fault in faults)
        assert worker.num_bytes <= limit
    finally:
        del gymnasium.registry["Long-v0"]


@pytest.mark.parametrize("fault", ["nan", "inf_reward", "wrong_shape", "wrong_dtype"])
def test_violation_of_the_spaces_leaves_the_row_pending(
    start_worker: StartWorker, fault: str
) -> None:
    worker = start_worker(FAULTY, env_kwargs={"fault": fault}).start_and_reset()
    worker.step(0, 0)
    (reported,) = worker.step(0, 1)["faults"]
    assert Fault(*reported).env_index == 1
    assert Fault(*reported).is_violation is True
    rows = worker.rows
    assert list(rows.status) == [Status.OK, Status.PENDING]
    assert rows.reward[0] == 1.0
    assert rows.observation[0].tolist() == [[2, 2, 2], [0, 0, 0]]
    assert np.isfinite(rows.final_observation[0]).all()
    assert worker.step(0, 0) is None
    assert rows.observation[0].tolist() == [[3, 3, 3], [1, 1, 1]]


class StoringEnv(gymnasium.Env[Any, Any]):
    """An env that stores every action, and returns the first one as observation."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = spaces.Box(0, 9, (2,), np.int64)
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.int64), {}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        return self.actions[0], 0.0, False, False, {}


class ResetInfoEnv(StoringEnv):
    def step(self, action: Any) -> Any:
        return action, 0.0, True, False, {"reset_info": 5}


def test_an_envs_own_reset_info_key_is_replaced(start_worker: StartWorker) -> None:
    gymnasium.register("ResetInfo-v0", lambda **_: ResetInfoEnv())
    try:
        worker = start_worker("ResetInfo-v0", infos="all").start_and_reset()
        infos = worker.step([0, 0], [0, 0])["infos"]
    finally:
        del gymnasium.registry["ResetInfo-v0"]
    assert infos == {0: {"reset_info": {}}, 1: {"reset_info": {}}}


class ListedFlagEnv(StoringEnv):
    def step(self, action: Any) -> Any:
        return action, 0.0, [False], False, {}


def test_a_list_that_contains_false_does_not_end_the_episode(
    start_worker: StartWorker,
) -> None:
    gymnasium.register("ListedFlag-v0", lambda **_: ListedFlagEnv())
    try:
        worker = start_worker("ListedFlag-v0").start_and_reset()
        assert worker.step([1, 2], [3, 4]) is None
    finally:
        del gymnasium.registry["ListedFlag-v0"]
    assert worker.rows.observation[0].tolist() == [[1, 2], [3, 4]]


class ReplacedStepEnv(StoringEnv):
    """An env that selects the method for its steps in each reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.step = self.echo  # type: ignore[method-assign]
        return super().reset()

    def echo(self, action: Any) -> Any:
        return action, 1.0, False, False, {}


def test_an_env_may_replace_its_step_method(start_worker: StartWorker) -> None:
    gymnasium.register("ReplacedStep-v0", lambda **_: ReplacedStepEnv())
    try:
        worker = start_worker("ReplacedStep-v0").start_and_reset()
        for actions in ([1, 2], [3, 4]), ([5, 6], [7, 8]):
            assert worker.step(*actions) is None
            assert worker.rows.observation[0].tolist() == [*actions]
    finally:
        del gymnasium.registry["ReplacedStep-v0"]


@pytest.fixture
def storing_env() -> Iterator[str]:
    gymnasium.register("Storing-v0", lambda **_: StoringEnv())
    yield "Storing-v0"
    del gymnasium.registry["Storing-v0"]


def test_action_that_an_env_stores_never_changes(
    start_worker: StartWorker, storing_env: str
) -> None:
    worker = start_worker(storing_env).start_and_reset()
    worker.step([1, 2], [3, 4])
    worker.step([5, 6], [7, 8])
    assert worker.rows.observation[0].tolist() == [[1, 2], [3, 4]]


def test_an_env_may_be_rebuilt_in_a_reset_within_the_timeout_of_resets(
    start_worker: StartWorker,
) -> None:
    workers: list[WorkerThread] = []
    values = [0.0, np.nan, 0.0]
    kinds: list[int] = []

    class NanEnv(gymnasium.Env[Any, Any]):
        observation_space, action_space = spaces.Box(-1, 1, ()), spaces.Discrete(2)

        def __init__(self) -> None:
            kinds.extend(int(worker.slab.heartbeats[0, 1]) for worker in workers)

        def reset(self, **_: Any) -> Any:
            return values.pop(0), {}

    gymnasium.register("Nan-v0", lambda **_: NanEnv())
    try:
        workers.append(start_worker("Nan-v0", 1).start_and_reset())
        (fault,) = workers[0].request(MessageKind.RESET)["faults"]
    finally:
        del gymnasium.registry["Nan-v0"]
    assert "to be finite; got nan" in str(fault)
    assert kinds == [1]


# Calls.


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("complain", ["too loud"], "ValueError: too loud"),
        ("no_such_thing", [], "AttributeError"),
        ("_observation", [1], "TypeError"),
        ("unwrapped", [], "cannot encode a value of type LedgerEnv"),
    ],
)
def test_call_that_fails_returns_the_traceback_and_costs_nothing(
    start_worker: StartWorker, name: str, arguments: list[Any], text: str
) -> None:
    worker = start_worker(LEDGER).start_and_reset()
    (fault,) = worker.call("call", name, *arguments)
    assert fault.env_index == 1
    assert text in fault.text
    assert worker.step(1, 1) is None


# Ending the worker.


@pytest.mark.parametrize("second", ["no level", "the port is in use"])
def test_the_error_of_an_env_whose_successor_fails_has_no_frames_of_envserve(
    start_worker: StartWorker, second: str
) -> None:
    texts = iter(["no level", second])

    class OneEpisodeEnv(ResetInfoEnv):
        def reset(self, **_: Any) -> Any:
            return super().reset() if self.is_first else self.fail()

        is_first = True

        def step(self, action: Any) -> Any:
            OneEpisodeEnv.is_first = False
            return super().step(action)

        def fail(self) -> None:
            raise ValueError(next(texts))

    gymnasium.register("OneEpisode-v0", lambda **_: OneEpisodeEnv())
    try:
        worker = start_worker("OneEpisode-v0", 1).start_and_reset()
        worker.send(MessageKind.STEP)
        failed = worker.receive()
    finally:
        del gymnasium.registry["OneEpisode-v0"]
    assert failed.kind is MessageKind.FAILED
    text = failed.payload.decode()
    assert "envserve/worker" not in text
    errors = [line for line in text.splitlines() if line.startswith("ValueError")]
    assert errors == [
        f"ValueError: {each}" for each in dict.fromkeys(["no level", second])
    ]


@pytest.mark.parametrize("kind", [MessageKind.DONE, MessageKind.BUILD])
def test_message_that_is_no_operation_ends_the_worker(
    start_worker: StartWorker, kind: MessageKind
) -> None:
    worker = start_worker(LEDGER).start()
    worker.send(kind)
    failed = worker.receive()
    assert failed.kind is MessageKind.FAILED
    assert "expected an operation on a block" in failed.payload.decode()


class ClosingEnv(gymnasium.Env[Any, Any]):
    """An env that counts how often it is closed; the first two closes raise."""

    observation_space = action_space = spaces.Discrete(2)
    closed = 0

    def close(self) -> None:
        ClosingEnv.closed += 1
        if ClosingEnv.closed == 1:
            raise RuntimeError("the window is gone")
        if ClosingEnv.closed == 2:
            sys.exit("the window is closed")


def test_without_watchers_an_operation_reads_a_single_number(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    class Until:
        def __getitem__(self, index: int) -> int:
            reads.append(index)
            return 0

    monkeypatch.setattr(
        process, "FrameRenderer", lambda *_: SimpleNamespace(watched_until=Until())
    )
    worker = start_worker(LEDGER).start_and_reset()  # sends a reset
    for _ in range(10):
        worker.step(0, 0)
    worker.close()
    assert reads == [0] * 11


@pytest.mark.parametrize("is_requested", [True, False], ids=["CLOSE", "end of file"])
def test_envs_are_closed_on_request_or_when_the_pool_exits(
    start_worker: StartWorker, is_requested: bool
) -> None:
    gymnasium.register("Closing-v0", lambda **_: ClosingEnv())
    ClosingEnv.closed = 0
    try:
        worker = start_worker("Closing-v0", 3).start()
        if is_requested:
            worker.send(MessageKind.CLOSE)
        worker.close()
    finally:
        del gymnasium.registry["Closing-v0"]
    assert ClosingEnv.closed == 3
