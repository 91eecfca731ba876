"""Where envs come from."""

from typing import Any

import pytest

from envserve.client import BatchEnv
from ppo.config import Config
from ppo.environments import env_maker

CONFIG = Config(
    env_name="CartPole-v1",
    env_kwargs={"sutton_barto_reward": True},
    wrappers=({"name": "ActionRepeat", "amount": 4},),
    step_timeout_seconds=7.0,
    server_lost_after_seconds=9.0,
    padding_after_seconds=0.5,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What BatchEnv was asked for: the way, positional and named arguments."""
    calls: list[tuple[Any, ...]] = []
    for way in ("local", "connect"):
        monkeypatch.setattr(
            BatchEnv,
            way,
            lambda *arguments, way=way, **named: calls.append((way, arguments, named)),
        )
    return calls


def test_envs_are_local_by_default(asked: list[tuple[Any, ...]]) -> None:
    env_maker(CONFIG, num_workers=3, import_modules=["mine"])(num_envs=8, seed=5)
    ((way, arguments, named),) = asked
    assert (way, arguments) == ("local", ("CartPole-v1",))
    assert named == {
        "num_envs": 8,
        "num_workers": 3,
        "seed": 5,
        "num_splits": 1,
        "env_kwargs": {"sutton_barto_reward": True},
        "wrappers": ({"name": "ActionRepeat", "amount": 4},),
        "autoreset": "same_step",
        "spare_envs": False,
        "import_modules": ("mine",),
        "step_timeout": 7.0,
        "reset_timeout": 120.0,
        "padding_after": 0.5,
        "max_restarts": 5,
        "on_fault": "truncate",
    }


def test_addresses_lead_to_servers(asked: list[tuple[Any, ...]]) -> None:
    config = CONFIG.replace(spare_envs=True, on_fault="raise", on_server_lost="pad")
    env_maker(config, addresses=["tcp://a:1", "tcp://b:1"])(num_envs=8, seed=5)
    ((way, arguments, named),) = asked
    assert way == "connect"
    assert arguments == ("CartPole-v1", ["tcp://a:1", "tcp://b:1"])
    assert named == {
        "num_envs": 8,
        "seed": 5,
        "num_splits": 1,
        "server_lost_after": 9.0,
        "on_server_lost": "pad",
        "on_fault": "raise",
        "env_kwargs": {"sutton_barto_reward": True},
        "wrappers": ({"name": "ActionRepeat", "amount": 4},),
        "autoreset": "same_step",
        "spare_envs": True,
    }
