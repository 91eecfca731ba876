"""Every module says what is public; the linter holds those names to exist."""

import importlib
import pkgutil

import ppo


def test_every_module_says_what_is_public() -> None:
    for module in pkgutil.walk_packages(ppo.__path__, "ppo."):
        assert hasattr(importlib.import_module(module.name), "__all__"), module.name
