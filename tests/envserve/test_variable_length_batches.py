"""Texts, sequences, graphs and choices as actions, in repro files and in batches."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envserve import make_vec
from envserve.client import BatchEnv
from envserve.crashes.action_ring import ActionRing, ring_nbytes
from envserve.crashes.repro_file import End, Repro, decode_repro, encode_repro
from envserve.errors import ActionError, CodecError, SpaceError
from envserve.pool.fault_log import _format_action
from envserve.settings import EnvRequest
from envserve.slab import Rows, Status, private_heartbeat
from envserve.spaces.action_checks import ActionBounds, check_actions
from envserve.spaces.env_spec import EnvSpec, describe, restore
from envserve.spaces.variable_length import decode_actions, encode_row
from envserve.worker.env_row import EnvRow
from envserve.worker.replay_worker import apply_actions
from envserve.worker.worker_report import decode_spaces, encode_spaces

from .space_table import TableEnv
from .space_table import __name__ as MODULE
from .stalls import fastest
from .test_space_table import assert_same, batch_values, make_batch
from .test_variable_length import FLOATS, leaf_of, row_of


def test_the_error_about_an_invalid_action_names_env_and_leaf() -> None:
    space = Dict({"say": Text(3), "wait": Discrete(2)})
    spec = EnvSpec("A", FLOATS, space)
    wait = np.zeros(2, np.int64)
    for say, words in (
        (("a", "abcd"), r"Env 5: action 'say': .*Text\(1, 3.*; got 'abcd'"),
        (("?", "a"), r"Env 4: action 'say': .*; got '\?'"),
        (("a", 3), "Env 5: action 'say': expected a value of .*; got 3"),
        (("a", "b" * 99), "Env 5: action 'say': .*at most 35 bytes; got 105"),
        (("a",), "action 'say': expected a tuple of 2 values, one per env"),
        ("ab", "action 'say': expected a tuple of 2 values, one per env"),
    ):
        with pytest.raises(ActionError, match=words):
            check_actions(spec, {"say": say, "wait": wait}, [4, 5], 2)


def test_a_server_does_not_decode_actions_but_a_worker_rejects_invalid_ones() -> None:
    spec = EnvSpec("A", FLOATS, Text(3))
    rows = Rows.allocate(spec, 2)
    rows.action[0][:] = row_of(spec.action_leaves[0], [1])
    ActionBounds(spec, rows.action).check(0, 2)
    with pytest.raises(CodecError, match="expected a value of Text"):
        decode_actions(spec, rows.action)


@pytest.mark.parametrize("name", ["dict_of_all", "sequence_stacked", "dict_empty"])
def test_a_repro_file_replays_the_same_actions(name: str) -> None:
    kwargs = {"space": name}
    request = EnvRequest(env_name="Table-v0", env_kwargs=kwargs, num_envs=1, seed=3)
    env = EnvRow(request, 0)
    spec = env.build()
    rows = Rows.allocate(spec, 1)
    ring = ActionRing(spec, 1, bytearray(ring_nbytes(spec, 1)))
    heartbeat = private_heartbeat()
    env.attach(rows, heartbeat, ring.row_record(0))
    env.reset(None)
    for _ in range(2):
        action = spec.action_space.sample()
        batch = batch_values(spec.action_space, [action])
        for target, array in zip(
            rows.action, check_actions(spec, batch, None, 1), strict=True
        ):
            target[...] = array
        ring.step_recorder(rows.action, 0, 1)()
        env.step(action)
    played = ring.read(0)
    assert played is not None
    repro = Repro(
        env_name="Table-v0",
        env_kwargs={"space": name},
        import_modules=(),
        autoreset="same_step",
        root_seed=3,
        seeded=True,
        env_index=0,
        timeout_seconds=1.0,
        played=played,
        end=End(status=Status.ENV_ERROR, text=""),
    )
    again = EnvRow(request, 0)
    again.build()
    numbers: list[int] = []
    seen = apply_actions(decode_repro(encode_repro(repro)), again, numbers.append)
    assert numbers == [0, 1, 2]
    for left, right in zip(rows.observation, seen.observation, strict=True):
        np.testing.assert_array_equal(left, right)


# Large boxes, and batches of values without a fixed shape.


BOUNDS = (("low", 0), ("high", 255))


def test_uniform_bounds_of_a_box_of_80_mib_take_no_memory() -> None:
    sides = {side: {"shape": [80 << 20], "fill": fill} for side, fill in BOUNDS}
    box = restore({**describe(Box(0, 255, (1,), np.uint8)), **sides})
    spec = EnvSpec("A", box, Discrete(2))
    payload = encode_spaces(spec)
    assert len(payload) < 400

    def attempt() -> float:
        began = time.thread_time()
        decode_spaces(payload, "A")
        return time.thread_time() - began

    assert fastest(attempt, 0.05) < 0.05
    space = decode_spaces(payload, "A").observation_space
    assert isinstance(space, Box)
    assert space.shape == box.shape
    assert space.low.base is not None
    assert space.low.base.nbytes == 1
    assert leaf_of(space).limits == (0, 255)
    assert describe(space) == describe(box)
    for side in sides.values():
        side["shape"] = [2**31]
    with pytest.raises(SpaceError, match="at most 1024 MiB"):
        restore({**describe(box), **sides})


def test_too_large_bounds_that_differ_raise_space_error() -> None:
    high = np.arange(16 << 20, dtype=np.uint8)
    space = Box(np.zeros_like(high), high, dtype=np.uint8)
    with pytest.raises(SpaceError, match="pass scalar `low` and `high`"):
        encode_spaces(EnvSpec("A", space, Discrete(2)))


MISSIONS = {"space": "dict_with_missions", "echoes_actions": False}
USER_CLASS = f"""
from envserve.client import BatchEnv
with BatchEnv.local("Table-v0", 4, 2, import_modules=[{MODULE!r}],
                    env_kwargs={MISSIONS}) as batch:
    batch.reset()
"""


def test_the_treatment_of_a_users_space_class_is_logged_once() -> None:
    command = [sys.executable, "-c", USER_CLASS]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stderr.count("a space of class Missions is treated as a text") == 1


@pytest.fixture
def batch() -> Iterator[BatchEnv]:
    with BatchEnv.local(
        "Table-v0", 4, 2, import_modules=[MODULE], env_kwargs=MISSIONS, seed=1
    ) as batch:
        yield batch


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_values_equal_those_of_gymnasiums_vector_env(mode: AutoresetMode) -> None:
    space = "dict_of_all"
    theirs = SyncVectorEnv([lambda: TableEnv(space)] * 2, autoreset_mode=mode)
    with contextlib.closing(
        make_vec(
            *("Table-v0", 2),
            autoreset_mode=mode,
            copy=False,
            env_kwargs={"space": space},
            import_modules=[MODULE],
        )
    ) as ours:
        first = ours.reset(seed=5)[0]
        assert ours.observation_space.contains(first)
        assert_same(first, theirs.reset(seed=5)[0])
        theirs.action_space.seed(1)
        for _ in range(8):
            actions = theirs.action_space.sample()
            seen, expected = ours.step(actions), theirs.step(actions)
            assert_same(seen[0], expected[0])
            if "final_obs" in expected[4]:
                for left, right in zip(
                    seen[4]["final_obs"], expected[4]["final_obs"], strict=True
                ):
                    assert_same(left, right)
        mask = np.array([False, True])
        again = ours.reset(seed=[None, 9], options={"reset_mask": mask})[0]
        assert again["name"][0] == seen[0]["name"][0]


def test_an_action_that_cannot_be_decoded_ends_only_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"num_workers": 2, "padding_after": math.inf}
    with make_batch(None, env_kwargs={"space": "text"}, **options) as batch:
        batch.reset()
        (leaf,) = batch.spec.action_leaves
        rows = np.stack([encode_row(leaf, "ab"), row_of(leaf, [1])])
        monkeypatch.setattr(
            "envserve.client.batch_env.check_actions", lambda *_: [rows]
        )
        result = batch.step(("ab", "ab"))
    assert result.valid.tolist() == [True, False]
    assert result.status[1] == Status.WORKER_DIED
    assert result.observation[0] == "ab"
    assert "expected a value of Text" in result.infos[1]["fault"]["text"]


def test_the_log_line_of_a_fault_shows_decoded_actions() -> None:
    spec = EnvSpec("A", FLOATS, Dict({"say": Text(3), "wait": Discrete(2)}))
    leaf = spec.action_leaves[0]
    for row, text in ((encode_row(leaf, "ab"), "(ab, 1)"), (row_of(leaf, [1]), " 0 ")):
        played: Any = SimpleNamespace(actions=(row[None], np.ones(1, np.int64)))
        assert text in _format_action(spec, played)


def test_out_must_be_none_for_observations_with_texts(batch: BatchEnv) -> None:
    assert batch.reset()["mission"][3].startswith("get the ")
    actions = np.zeros(4, np.int64)
    result = batch.step(actions)
    with pytest.raises(ValueError, match="out: expected None"):
        batch.step(actions, result)
    batch.send(actions)
    with pytest.raises(ValueError, match="out: expected None"):
        batch.recv(env_indices=range(4), out=result)
    rows, result = batch.recv(2)
    assert len(result.observation["mission"]) == len(rows)
