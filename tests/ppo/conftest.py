"""A fixture that makes local batches start faster."""

import contextlib
from collections.abc import Iterator

import pytest

from envserve.pool.launcher import Launcher
from tests.envserve.conftest import pools_of
from tests.ppo import failing_env, film_env, unsteady_env

MODULES = [
    film_env.__name__,
    f"{failing_env.__name__}:Failing",
    f"{unsteady_env.__file__}:Unsteady",
]


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    with contextlib.closing(Launcher(MODULES, ["CartPole-v1"])) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def one_launcher(launcher: Launcher) -> Iterator[None]:
    """Make all local batches of a module share one launcher, which starts slowly."""
    with pools_of(launcher):
        yield
