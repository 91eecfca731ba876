"""Every module says what is public, and has it."""

import importlib
import pkgutil

import pytest

import ppo

MODULES = [module.name for module in pkgutil.walk_packages(ppo.__path__, "ppo.")]


@pytest.mark.parametrize("name", MODULES)
def test_public_names_exist_and_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__ == sorted(module.__all__, key=_ruff_order)
    for public in module.__all__:
        value = getattr(module, public)
        if getattr(value, "__module__", None) == name:
            assert value.__doc__, f"{name}.{public} has no docstring"


def _ruff_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each sorted."""
    if name.isupper():
        return (0, name)
    return (1 if name[0].isupper() else 2, name)
