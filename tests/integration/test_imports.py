"""Modules of envserve import no trainer, unless they are that trainer's adapter."""

from __future__ import annotations

import pytest

from tests.test_project import loaded_by

TRAINERS = {"jax", "ray", "stable_baselines3", "tensorflow", "tianshou", "torch"}


@pytest.mark.parametrize("module", ["client.batch_env", "gym", "ray", "server"])
def test_a_module_loads_no_trainer(module: str) -> None:
    loaded = loaded_by(f"import envserve; envserve.make_vec; import envserve.{module}")
    assert "gymnasium" in loaded
    assert loaded & TRAINERS == set()


def test_an_adapter_loads_no_other_trainer() -> None:
    assert "tianshou" not in loaded_by("import envserve.sb3")
    assert "stable_baselines3" not in loaded_by("import envserve.tianshou")
