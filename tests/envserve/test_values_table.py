"""Whatever an env returns arrives right, or with a sentence that says what is wrong.

Each row of one batch steps with another case of `odd_values`, here and at a server.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from envserve.crashes.action_ring import RowRecord
from envserve.errors import EnvStartError
from envserve.lane import Fault
from envserve.pool.launcher import Launcher
from envserve.settings import EnvRequest
from envserve.slab import Rows, private_heartbeat
from envserve.spaces.leaves import unflatten
from envserve.worker.env_checks import EnvChecks, SpaceViolation
from envserve.worker.env_row import EnvRow
from tests.envserve.pool_driver import PoolMaker, attach_lane, reset, step
from tests.envserve.server_process import ServerProcess
from tests.oracle.odd_values import CASES, LEAVES, MODULE, NAME, TABLES

KINDS = ("observation", "reward", "flag", "step", "info")
NAMES = [
    f"{kind}: {name}"
    for kind, table in zip(KINDS, TABLES, strict=True)
    for name in table
]
ALONE = [
    row for row, case in enumerate(CASES) if case.part in LEAVES and case.part != "t"
]


class Seen(NamedTuple):
    """What came of a step of all cases."""

    faults: Mapping[int, Fault]
    infos: Mapping[int, Mapping[Any, Any]]
    rows: Rows
    observations: Mapping[str, Any]
    warnings: list[str]
    images: Mapping[int, Mapping[str, Any]]


@pytest.fixture(scope="module", params=["here", "server"])
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seen]:
    """A step of all cases, by workers here or of a server."""
    folder: Path = tmp_path_factory.mktemp("values")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("envserve").addHandler(handler)
    num_rows = len(CASES)
    try:
        if request.param == "here":
            maker = PoolMaker(Launcher([MODULE]))
            lane: Any = maker.and_reset(NAME, num_rows, 2, infos="all")
            yield look(lane, warnings)
            maker.close()
            maker.launcher.close()
        else:
            options = ("--import", MODULE, "--workers", "2")
            with ServerProcess(folder, *options) as server:
                lane = attach_lane(server, NAME, num_rows, infos="all")
                yield look(lane, warnings)
                lane.close()
    finally:
        logging.getLogger("envserve").removeHandler(handler)


def look(lane: Any, warnings: list[str]) -> Seen:
    outcomes = step(lane, range(len(CASES)))
    assert all(outcome.error is None for outcome in outcomes)
    rows = lane.rows.at(np.arange(len(CASES)))  # copies
    found = Seen(
        {fault.env_index: fault for each in outcomes for fault in each.faults},
        {row: info for each in outcomes for row, info in each.infos.items()},
        rows,
        unflatten(lane.spec.observation_space, rows.observation),
        warnings,
        {},
    )
    reset(lane)
    actions = np.full(len(CASES), NAMES.index("info: none"))
    actions[:64] = NAMES.index("info: image")
    outcomes = step(lane, actions)
    assert not any(each.faults for each in outcomes)
    images = {row: info for each in outcomes for row, info in each.infos.items()}
    return found._replace(images=images)


@pytest.mark.parametrize("row", range(len(CASES)), ids=NAMES.__getitem__)
def test_it_is_right_or_has_its_sentence(seen: Seen, row: int) -> None:
    case = CASES[row]
    if isinstance(case.expected, str):
        assert case.expected in seen.faults[row].text
        assert seen.faults[row].is_violation
        assert "\n" not in seen.faults[row].text
        return
    assert row not in seen.faults
    if case.part == "info":
        expected = case.value if case.expected is ... else case.expected
        np.testing.assert_equal(seen.infos.get(row, {}), expected)
    elif case.part in ("reward", "terminated", "truncated"):
        assert getattr(seen.rows, case.part)[row] == case.expected
    elif case.part == "t":
        assert tuple(leaf[row] for leaf in seen.observations["t"]) == case.expected
    else:
        part = "f" if case.part == "observation" else case.part
        array = seen.observations[part]
        assert array.dtype == LEAVES[part][0].dtype
        np.testing.assert_array_equal(array[row], case.expected)


def test_infos_of_64_rows_of_12_kb_arrive_whole(seen: Seen) -> None:
    assert list(seen.images) == [*range(64)]
    for info in seen.images.values():
        assert info["a"].nbytes == 12_288
        assert info["k"] == 1


def test_a_reset_that_breaks_the_rules_is_not_tried_again() -> None:
    closing = contextlib.closing
    with closing(Launcher([MODULE])) as launcher, closing(PoolMaker(launcher)) as maker:
        kwargs = {"has_info": False}
        pool = maker(NAME, 2, 1, env_kwargs=kwargs, max_restarts=1000)
        (outcome,) = reset(pool)
    assert isinstance(outcome.error, EnvStartError)
    assert outcome.error.remote_traceback.startswith(
        "expected reset() to return an observation and a dict of infos; got a dict of 8"
    )


def test_what_is_cast_is_said_once(seen: Seen) -> None:
    """However many workers, rows and leaves there are."""
    (said,) = [text for text in seen.warnings if "OddValuesEnv gives" in text]
    assert "observation '" in said
    assert "its space says" in said


@pytest.mark.parametrize("is_strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("row", ALONE, ids=NAMES.__getitem__)
def test_a_leaf_alone_is_taken_like_one_of_a_dict(row: int, is_strict: bool) -> None:
    case = CASES[row]
    checks = EnvChecks(strict_spaces=is_strict)
    kwargs = {"part": case.part}
    request = EnvRequest(env_name=NAME, env_kwargs=kwargs, num_envs=1, seed=0)
    env = EnvRow(request, 0, checks=checks)
    spec = env.build()
    (leaf,) = spec.observation_leaves
    rows = Rows.allocate(spec, 1)
    env.attach(rows, private_heartbeat(), RowRecord.private())
    env.reset(None)

    def play() -> None:
        env.step(row)
        env.check_finite()

    value = case.value
    is_odd = isinstance(value, np.ndarray) and value.ndim and value.dtype != leaf.dtype
    if isinstance(case.expected, str) or (is_odd and is_strict):
        expected = "" if is_strict else case.expected.replace(f"{case.part!r} ", "")
        with pytest.raises(SpaceViolation) as caught:
            play()
        assert expected in str(caught.value)
    else:
        play()
        np.testing.assert_array_equal(rows.observation[0][0], case.expected)
        assert bool(checks.notes) == bool(is_odd)


def test_the_table_is_long_enough() -> None:
    observations, rewards, *_, infos = map(len, TABLES)
    assert observations + rewards >= 40
    assert infos >= 25
