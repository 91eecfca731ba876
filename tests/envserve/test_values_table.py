"""Every value that an env returns arrives correctly, or as a fault with a clear text.

Each row of a batch steps with a different case from `odd_values`, in a local pool and
on a server.
"""

from __future__ import annotations

import contextlib
import decimal
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces

from envserve.crashes.action_ring import RowRecord
from envserve.errors import EnvStartError
from envserve.lane import Fault
from envserve.pool.launcher import Launcher
from envserve.settings import EnvRequest
from envserve.slab import Rows, private_heartbeat
from envserve.spaces.leaves import leaves_of, unflatten
from envserve.worker.env_checks import (
    EnvChecks,
    SpaceViolation,
    convert_flag,
    convert_leaf,
)
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


class StepOfAllCases(NamedTuple):
    """The outcomes of a step with all cases, and of a later one with image infos."""

    faults: Mapping[int, Fault]
    infos: Mapping[int, Mapping[Any, Any]]
    rows: Rows
    observations: Mapping[str, Any]
    warnings: list[str]
    images: Mapping[int, Mapping[str, Any]]


@pytest.fixture(scope="module", params=["here", "server"])
def result(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StepOfAllCases]:
    """Step all cases, in a local pool or on a server."""
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
            yield step_all_cases(lane, warnings)
            maker.close()
            maker.launcher.close()
        else:
            options = ("--import", MODULE, "--workers", "2")
            with ServerProcess(folder, *options) as server:
                lane = attach_lane(server, NAME, num_rows, infos="all")
                yield step_all_cases(lane, warnings)
                lane.close()
    finally:
        logging.getLogger("envserve").removeHandler(handler)


def step_all_cases(lane: Any, warnings: list[str]) -> StepOfAllCases:
    outcomes = step(lane, range(len(CASES)))
    assert all(outcome.error is None for outcome in outcomes)
    rows = lane.rows.at(np.arange(len(CASES)))  # copies
    found = StepOfAllCases(
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
def test_a_value_arrives_correctly_or_is_reported_as_a_fault(
    result: StepOfAllCases, row: int
) -> None:
    case = CASES[row]
    if isinstance(case.expected, str):
        assert case.expected in result.faults[row].text
        assert result.faults[row].is_violation
        assert "\n" not in result.faults[row].text
        return
    assert row not in result.faults
    if case.part == "info":
        expected = case.value if case.expected is ... else case.expected
        np.testing.assert_equal(result.infos.get(row, {}), expected)
    elif case.part in ("reward", "terminated", "truncated"):
        assert getattr(result.rows, case.part)[row] == case.expected
    elif case.part == "t":
        assert tuple(leaf[row] for leaf in result.observations["t"]) == case.expected
    else:
        part = "f" if case.part == "observation" else case.part
        array = result.observations[part]
        assert array.dtype == LEAVES[part][0].dtype
        np.testing.assert_array_equal(array[row], case.expected)


def test_infos_of_12_kb_in_64_rows_are_complete(result: StepOfAllCases) -> None:
    assert list(result.images) == [*range(64)]
    for info in result.images.values():
        assert info["a"].nbytes == 12_288
        assert info["k"] == 1


def test_an_invalid_reset_is_not_repeated() -> None:
    closing = contextlib.closing
    with closing(Launcher([MODULE])) as launcher, closing(PoolMaker(launcher)) as maker:
        kwargs = {"has_info": False}
        pool = maker(NAME, 2, 1, env_kwargs=kwargs, max_restarts=1000)
        (outcome,) = reset(pool)
    assert isinstance(outcome.error, EnvStartError)
    assert str(outcome.error).startswith(
        "expected reset() to return an observation and an info dict; got a dict of 8"
    )


@pytest.mark.parametrize("value", [None, [], {}, "", 0j, decimal.Decimal(0)], ids=repr)
def test_an_empty_flag_is_false_at_the_end_of_an_episode(value: object) -> None:
    assert convert_flag("truncated", value) is False


def test_a_cast_is_logged_once(result: StepOfAllCases) -> None:
    """The number of workers, rows and leaves has no effect."""
    (line,) = [text for text in result.warnings if "OddValuesEnv returns" in text]
    assert "observation '" in line
    assert "its space declares" in line


@pytest.mark.parametrize("is_strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("row", ALONE, ids=NAMES.__getitem__)
def test_a_single_leaf_is_checked_like_a_leaf_of_a_dict(
    row: int, is_strict: bool
) -> None:
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
        assert bool(checks.take_warnings()) == bool(is_odd)


@pytest.mark.parametrize(("value", "expected"), [(1e-300, 0.0), (1e300, np.inf)])
def test_a_value_is_cast_although_an_env_makes_numpy_raise_errors(
    value: float, expected: float
) -> None:
    (leaf,) = leaves_of(spaces.Box(-np.inf, np.inf, (1,), np.float32))
    with np.errstate(all="raise"):
        cast = convert_leaf(leaf, np.array([value]), EnvChecks(), object)
    assert cast.tolist() == [expected]
