"""Clients can request only names that are registered when the server starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gymnasium
import pytest

from envserve.envs import registry
from envserve.envs.registry import (
    arguments_of,
    import_env_modules,
    make_env,
    offered_names,
)
from envserve.errors import EnvStartError, UnknownEnv
from envserve.text import install_command
from tests.oracle.probe_envs import NativeMethod

LEDGER = "envserve/Ledger-v0"


def test_without_names_every_registered_env_is_offered() -> None:
    names = offered_names(import_modules=["tests.oracle.probe_envs"])
    assert {"CartPole-v1", LEDGER} <= set(names)
    assert list(names) == sorted(names)


def test_with_names_only_those_are_offered() -> None:
    names = offered_names(["Pendulum-v1", "CartPole-v1", "CartPole-v1"])
    assert names == ("CartPole-v1", "Pendulum-v1")


def test_names_that_only_explain_where_an_env_has_moved_are_not_offered() -> None:
    assert {"Ant-v2", "Ant-v5", "GymV21Environment-v0"} <= gymnasium.registry.keys()
    names = {*offered_names()}
    assert {"Ant-v5", "CartPole-v1"} <= names
    assert not {"Ant-v2", "GymV21Environment-v0"} & names


def test_the_error_about_an_unknown_name_suggests_only_similar_names() -> None:
    with pytest.raises(UnknownEnv, match=r"CartPool-v1.*did you mean.*CartPole-v1"):
        offered_names(["CartPool-v1"])
    for name, hint in (
        ("Pendulum-v0", "mean Pendulum-v1"),
        ("lunarlander", "LunarLander-v3"),
    ):
        with pytest.raises(UnknownEnv, match=hint):
            make_env(name, {})
    for name in ("Foo-v0", "Mine-v0", "Walk-v0", "ALE/Nothing-v5"):
        with pytest.raises(UnknownEnv) as caught:
            make_env(name, {})
        assert "did you mean" not in str(caught.value)
    with pytest.raises(UnknownEnv, match=r"pass src/lab/armpy\.py:Arm, or"):
        make_env("src/lab/armpy:Arm", {})


@pytest.mark.parametrize(
    "name", ["this:Env-v0", "os:system", "this", "../CartPole-v1", ""]
)
def test_a_name_is_never_imported(name: str) -> None:
    sys.modules.pop("this", None)
    with pytest.raises(UnknownEnv):
        make_env(name, {})
    assert "this" not in sys.modules


def test_the_arguments_of_a_constructor_without_a_signature_are_unknown() -> None:
    class Native:
        __init__ = NativeMethod(object.__init__)

    assert arguments_of(Native) == set()


def test_an_env_is_built_with_its_arguments() -> None:
    import_env_modules(["tests.oracle.probe_envs"])
    env = make_env(LEDGER, {"length": 1})
    env.reset(seed=0)
    assert env.step(5)[2] is True
    env.close()


def test_the_error_about_a_missing_module_names_it() -> None:
    message = (
        r"'no_such_envs'.*ModuleNotFoundError.*; install it, or add it to PYTHONPATH"
    )
    with pytest.raises(EnvStartError, match=message):
        import_env_modules(["no_such_envs"])


def test_the_error_about_missing_atari_games_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)  # as if it were not installed
    with pytest.raises(
        EnvStartError, match=re.escape(f"; {install_command('atari')} on the host")
    ):
        import_env_modules(["ale_py"])


def test_preload_imports_the_module_of_an_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "preloaded_envs.py").write_text("class Env: pass")
    monkeypatch.syspath_prepend(tmp_path)
    gymnasium.register("Preloaded-v0", "preloaded_envs:Env")
    try:
        registry.preload("Preloaded-v0")
        assert "preloaded_envs" in sys.modules
    finally:
        del gymnasium.registry["Preloaded-v0"]
        sys.modules.pop("preloaded_envs", None)


def test_preload_of_an_unknown_env_does_nothing() -> None:
    before = set(sys.modules)
    registry.preload("this:NoSuchEnv-v0")
    assert set(sys.modules) == before
