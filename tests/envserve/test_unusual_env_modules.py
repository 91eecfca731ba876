"""Unusual behaviour of env modules that workers have to tolerate."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from envserve import BatchEnv, make_vec
from envserve.errors import EnvStartError
from envserve.pool.launcher import Launcher
from envserve.settings import Autoreset
from envserve.worker.channel import Channel, ChannelMessage, MessageKind, pack_message

pytestmark = pytest.mark.usefixtures("one_launcher")

ENVS = """
import ctypes, dataclasses, os, socket, time, weakref
import gymnasium, numpy as np
from gymnasium import spaces

LIBC = ctypes.CDLL(None)
LIBC.printf(b"imported natively\\n")
print("imported")
LIBC.printf(b"half a line")
socket.setdefaulttimeout(0.25)


class Env(gymnasium.Env):
    observation_space = spaces.Box(0.0, 9.0, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.own, self.position = {}, np.zeros(2, np.float32)

    def reset(self, seed=None):
        super().reset(seed=seed)
        self.own.clear()
        self.position[...] = 0.0
        return self.position.copy(), {}

    def step(self, action):
        self.position += 1.0
        self.own["success"] = [True]
        info = {"position": self.position, "all": [self.own]}
        return self.position.copy(), 1.0, self.position[0] == 3.0, False, info


class Sharing(Env):
    info = {"row": 0, "rows": np.zeros(1, np.int64), "nested": {"row": [0]}}

    def reset(self, seed=None):
        return super().reset(seed=seed)[0], self.shared_info()

    def step(self, action):
        return *super().step(action)[:4], self.shared_info()

    def shared_info(self):
        row = self.np_random_seed
        self.info["row"] = self.info["rows"][0] = self.info["nested"]["row"][0] = row
        return self.info


class Swapped(Env):
    observation_space = spaces.Box(0.0, 9.0, (2,), np.dtype(np.float32).newbyteorder())
    action_space = spaces.Box(0, 9, (1,), np.dtype(np.int32).newbyteorder())

    def step(self, action):
        return *super().step(action)[:1], float(action[0]), False, False, {}


class Dying(Env):
    def step(self, action):
        print("last words")
        LIBC.printf(b"last native words\\n")
        os._exit(3)


class Changing(Env):
    built = 0

    def __init__(self):
        Changing.built += 1
        shape = (2,) if self.built == 1 else (1,)
        self.observation_space = spaces.Box(0.0, 9.0, shape)
        self.position = np.zeros(shape, np.float32)
        self.own = {}

    def step(self, action):
        if action == 1:
            raise ValueError("odd action")
        return super().step(action)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class Frozen(Env):
    built = 0

    def __init__(self, good=0):
        super().__init__()
        Frozen.built += 1
        if Frozen.built > good:
            raise FrozenError(self.built)


class Several(gymnasium.vector.VectorEnv):
    metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
    single_observation_space = observation_space = spaces.Discrete(9)
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs=2):
        self.num_envs, self.length = num_envs, np.zeros(num_envs, np.int64)
        self.observation_space = spaces.MultiDiscrete([9] * num_envs)
        self.action_space = spaces.MultiDiscrete([2] * num_envs)

    def reset(self, *, seed=None, options=None):
        self.length[(options or {}).get("reset_mask", slice(None))] = 0
        return self.length.copy(), {}

    def step(self, actions):
        self.length += 1
        ended = self.length == 3
        infos = {"length": self.length}
        return self.length.copy(), np.ones(2), ended, np.zeros(2, bool), infos


gymnasium.register("Several-v0", vector_entry_point=Several)


class Failing(Env):
    # The reward is the number of envs in memory.
    in_memory = weakref.WeakSet()

    def __init__(self):
        super().__init__()
        self.in_memory.add(self)

    def step(self, action):
        if action == 1:
            raise ValueError("odd action")
        observation, _, *others = super().step(action)
        return observation, len(self.in_memory), *others


class SeveralFailing(Several):
    in_memory = weakref.WeakSet()

    def __init__(self, num_envs=2):
        super().__init__(num_envs)
        self.itself = self
        self.in_memory.add(self)

    def step(self, actions):
        if actions.any():
            raise ValueError("odd action")
        observation, rewards, *others = super().step(actions)
        return observation, rewards * len(self.in_memory), *others


gymnasium.register("Failing-v0", Failing, vector_entry_point=SeveralFailing)
"""


@pytest.fixture(scope="module")
def envs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("envs") / "habits.py"
    path.write_text(ENVS)
    return path


@pytest.fixture(scope="module")
def launcher(envs: Path) -> Iterator[Launcher]:
    """A launcher that has imported the file."""
    names = ("Env", "Sharing", "Swapped", "Changing", "Frozen")
    with contextlib.closing(Launcher([f"{envs}:{name}" for name in names])) as launcher:
        yield launcher


@pytest.mark.parametrize("spare_envs", [False, True])
def test_infos_of_an_ended_episode_are_not_changed_by_the_next(
    spare_envs: bool, envs: Path
) -> None:
    with BatchEnv.local(f"{envs}:Env", 2, num_workers=1, spare_envs=spare_envs) as env:
        env.reset()
        for step in range(1, 10):
            infos = env.step(np.zeros(2, np.int64)).infos
            if step % 3 == 0:
                assert infos[1]["position"].tolist() == [3.0, 3.0]
                assert infos[1]["all"] == [{"success": [True]}]


def test_spaces_may_have_another_byte_order(envs: Path) -> None:
    with BatchEnv.local(f"{envs}:Swapped", 2, num_workers=1) as env:
        assert env.reset().tolist() == [[0.0, 0.0]] * 2
        result = env.step(np.array([[3], [4]], np.int32))
        assert result.observation.tolist() == [[1.0, 1.0]] * 2
        assert result.reward.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_envs_of_a_worker_may_share_an_info(autoreset: Autoreset, envs: Path) -> None:
    with BatchEnv.local(
        f"{envs}:Sharing", 2, num_workers=1, infos="all", autoreset=autoreset
    ) as env:
        env.reset(seeds=[5, 6])
        for infos in [
            env.reset_infos,
            *[env.step(np.zeros(2, np.int64)).infos for _ in range(3)],
        ]:
            for row, expected in enumerate([5, 6]):
                assert infos[row]["row"] == expected
                assert infos[row]["rows"].tolist() == [expected]
                assert infos[row]["nested"] == {"row": [expected]}


def test_infos_of_an_ended_episode_in_a_vector_env_are_not_changed_by_the_next(
    envs: Path,
) -> None:
    with BatchEnv.local(
        "Several-v0", 2, num_workers=1, import_modules=[str(envs)], vectorized=True
    ) as env:
        env.reset()
        for _ in range(3):
            infos = env.step(np.zeros(2, np.int64)).infos
    assert infos[0]["length"] == 3


def test_a_rebuilt_env_must_have_the_same_spaces(envs: Path) -> None:
    with BatchEnv.local(f"{envs}:Changing", 1, num_workers=1, infos="all") as env:
        env.reset()
        result = env.step(np.ones(1, np.int64))
        assert not result.valid[0]
        text = result.infos[0]["fault"]["text"]
        assert "Env 0: its spaces changed when it was rebuilt" in text
        assert "got Box(0.0, 9.0, (1,), float32)" in text


@pytest.mark.parametrize("vectorized", [False, True])
def test_the_memory_of_envs_that_have_failed_is_freed(
    vectorized: bool, envs: Path
) -> None:
    with BatchEnv.local(
        "Failing-v0", 2, 1, import_modules=[str(envs)], vectorized=vectorized
    ) as env:
        env.reset()
        for _ in range(20):
            env.step(np.ones(2, np.int64))
            in_memory = env.step(np.zeros(2, np.int64)).reward
        # Each row has its env, the predecessor, and the first env of the process.
        assert in_memory.max() <= 6


@pytest.mark.parametrize("good", [0, 1])
def test_an_exception_that_cannot_be_changed_is_reported(envs: Path, good: int) -> None:
    with pytest.raises(EnvStartError) as caught:
        BatchEnv.local(f"{envs}:Frozen", 2, 1, env_kwargs={"good": good})
    assert f"habits.FrozenError: {good + 1}" in str(caught.value)
    assert "FrozenInstanceError" not in str(caught.value)


def test_a_default_socket_timeout_of_an_import_does_not_affect_workers(
    envs: Path,
) -> None:
    with BatchEnv.local(f"{envs}:Env", 2, num_workers=1) as env:
        env.reset()
        for _ in range(2):
            assert env.step(np.zeros(2, np.int64)).valid.all()
            time.sleep(1.0)  # like a learner between two steps


def test_a_masked_reset_works_for_envs_without_options(envs: Path) -> None:
    env = make_vec(f"{envs}:Env", 2, num_workers=1, autoreset_mode="Disabled")
    try:
        env.reset()
        env.step(np.zeros(2, np.int64))
        mask = np.array([True, False])
        observation, _ = env.reset(options={"reset_mask": mask})
        assert observation[:, 0].tolist() == [0.0, 1.0]
    finally:
        env.close()


PRINTS = """
import sys
import numpy as np
from envserve import BatchEnv
with BatchEnv.local(f"{sys.argv[1]}:Dying", 4, num_workers=4) as env:
    print(" is completed", file=sys.stderr)
    env.reset()
    for _ in range(2):
        env.step(np.zeros(4, np.int64))
"""


def test_output_of_envs_is_forwarded_once_however_they_end(envs: Path) -> None:
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PRINTS, str(envs)]
    ended = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    for text in ("last words", "last native words"):
        assert ended.stderr.count(f"\n{text}\n") >= 4
    for text in ("imported", "imported natively"):
        assert f"\n{ended.stderr}".count(f"\n{text}\n") == 1
    assert ended.stderr.count("half a line") == 1
    assert ended.stdout == ""


CLOSED = """
import sys
from pathlib import Path
import numpy as np
from envserve import BatchEnv
with BatchEnv.local(f"{sys.argv[1]}:Env", 2, num_workers=1, start_timeout=100) as env:
    env.reset()
    valid = env.step(np.zeros(2, np.int64)).valid
Path(sys.argv[2]).write_text(str(valid.tolist()))
"""


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_do_no_harm(
    closed: str, envs: Path, tmp_path: Path
) -> None:
    words = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", CLOSED]
    result = tmp_path / "result"
    subprocess.run([*words, str(envs), str(result)], timeout=300)
    assert result.read_text() == "[True, True]"


def test_waiting_for_a_reply_sends_the_rest_of_the_request() -> None:
    ours, theirs = socket.socketpair()
    size = 16 << 20

    def reply() -> None:
        left = len(pack_message(MessageKind.REPLAY, payload=bytes(size)))
        while left:
            left -= len(theirs.recv(1 << 16))
        theirs.sendall(pack_message(MessageKind.DONE))

    with theirs:
        channel = Channel(ours)
        channel.send(pack_message(MessageKind.REPLAY, payload=bytes(size)))
        thread = threading.Thread(target=reply, daemon=True)
        thread.start()
        until = time.monotonic() + 200
        frames: list[ChannelMessage] = []
        while not frames and time.monotonic() < until:
            channel.wait(200)
            frames = channel.read()
        channel.close()
        thread.join()
    assert [frame.kind for frame in frames] == [MessageKind.DONE]
    assert time.monotonic() < until
