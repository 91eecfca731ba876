"""The JavaScript server of examples/node_server: wire format, protocol and envs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from envserve.check.probe_client import ServerUnderTest, SocketLink
from envserve.check.rules import check
from envserve.client import BatchEnv
from envserve.client.link.sessionless_requests import request_welcome
from envserve.envs.seeding import env_seed
from envserve.errors import ConnectError
from envserve.keys.key_folder import KeyFolder
from envserve.keys.key_pair import KeyPair
from tests.envserve.server_process import ROOT
from tests.envserve.test_wire_document import documented_frames, example

NAME = "GridWalk-v0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its dependencies installed."""
    copy = tmp_path_factory.mktemp("node") / "server"
    shutil.copytree(ROOT / "examples" / "node_server", copy)
    options = ("--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund")
    subprocess.run(["npm", "install", *options], cwd=copy, check=True)
    return copy


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The address of a running server, which uses this user's keys."""
    assert KeyFolder().ensure_key("server")
    assert KeyFolder().ensure_key("client")
    process = subprocess.Popen(
        ["node", "server.mjs", "--bind", "tcp://127.0.0.1:*", "--lease-seconds", "4"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("ready on ").strip()
        process.terminate()


def test_the_server_passes_envserve_check(address: str) -> None:
    found = list(check(ServerUnderTest(lambda: SocketLink(address))))
    assert [f for f in found if f.outcome != "ok"] == [] != found


def test_a_client_with_another_key_is_rejected(address: str, tmp_path: Path) -> None:
    unknown_client = KeyFolder(tmp_path)
    server = KeyFolder().key("server")
    assert server is not None
    unknown_client.add_pin([address], server.public, "me")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENVSERVE_HOME", str(tmp_path))
        assert isinstance(unknown_client.ensure_key("client"), KeyPair)
        with pytest.raises(ConnectError, match="does not know this client's key"):
            request_welcome(address, 10.0)


def test_a_learner_learns_on_the_server(address: str) -> None:
    """Use Q-learning with 9 states (the direction of the goal) and 4 actions."""
    draws = np.random.default_rng(0)
    values = np.zeros((9, 4))
    with BatchEnv.connect(NAME, [address], 32, seed=1) as env:
        untrained = mean_return(env, lambda at: draws.integers(0, 4, 32))
        observation = env.reset()
        for _ in range(150):
            at, are_random = cases(observation), draws.random(32) < 0.3
            best = values[at].argmax(1)
            actions = np.where(are_random, draws.integers(0, 4, 32), best)
            result = env.step(actions)
            continues = ~(result.terminated | result.truncated)
            after = values[cases(result.observation)].max(1)
            target = result.reward + 0.9 * continues * after
            np.add.at(values, (at, actions), 0.1 * (target - values[at, actions]))
            observation = result.observation
        trained = mean_return(env, lambda at: values[at].argmax(1))
    assert untrained < 0.4
    assert trained > 0.75


def cases(observation: Any) -> Any:
    across, along = (np.sign(observation[:, 2 + i] - observation[:, i]) for i in (0, 1))
    return (3 * across + along + 4).astype(int)


def mean_return(env: BatchEnv, choose: Any) -> float:
    """Return the mean return over each row's first episode."""
    observation, returns, is_first = env.reset(), np.zeros(32), np.ones(32)
    while is_first.any():
        result = env.step(choose(cases(observation)))
        returns += is_first * result.reward
        is_first *= ~(result.terminated | result.truncated)
        observation = result.observation
    return float(returns.mean())


def test_messages_equal_the_golden_vectors_of_the_document(folder: Path) -> None:
    vectors = {
        name: [bytes.fromhex(f) for f in documented_frames(name)] for name in example()
    }
    given = {name: [frame.hex() for frame in vectors[name]] for name in vectors}
    file = ROOT / "tests/integration/node_vectors.mjs"
    script = [str(file), str(folder / "wire.mjs")]
    run = subprocess.run(
        ["node", *script],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
    )
    output = json.loads(run.stdout)
    for name, frames in given.items():
        assert output[name]["frames"] == frames, name
        assert output[name]["trouble"] == ""
        if output[name]["body"] is not None:
            num_entries = int.from_bytes(vectors[name][0][38:40], "little")
            body = msgpack.unpackb(
                vectors[name][0][44 + 12 * num_entries :], strict_map_key=False
            )
            assert output[name]["body"] == json.loads(json.dumps(body, default=as_hex))
    assert given["RESULT"][0].endswith(output["rows"])


def as_hex(value: bytes) -> dict[str, str]:
    return {"hex": value.hex()}


def test_seeds_equal_those_of_numpy_in_javascript(folder: Path) -> None:
    cases = [(5, 7, 3), (0, 0, 0), (2**63 - 1, 65535, 2**32 - 1), (1 << 40, 1, 0)]
    calls = ", ".join(f"envSeed({s}n, {i}, {n})" for s, i, n in cases)
    script = f'import {{ envSeed }} from "./grid.mjs"; console.log([{calls}].join())'
    output = subprocess.check_output(
        ["node", "--input-type=module", "-e", script], cwd=folder, text=True
    )
    assert list(map(int, output.split(","))) == [env_seed(*case) for case in cases]
