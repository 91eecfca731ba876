"""The README and docs are complete, and mention only things that exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import yaml

import envserve.errors
import ppo.errors
from envserve.client.link.zmq_guards.diagnosis import Finding, connection_error
from ppo.config import Config
from scripts.generate_reference import PAGE, page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_page_of_settings_is_current() -> None:
    """The page is written by scripts/generate_reference.py."""
    assert PAGE.read_text() == page()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"[\w-]+\.(?:md|ipynb)", nav)
    pages = [path.name for path in DOCS.iterdir() if path.suffix in (".md", ".ipynb")]
    assert sorted(listed) == sorted(pages)


def test_every_public_name_is_on_the_api_page_with_a_docstring() -> None:
    """A name is public if a module lists it in `__all__`; ruff checks its members."""
    listed = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.M)
    names = {each.rpartition(".")[2] for each in listed}
    public, documented = set(), set()
    for package in ("envserve", "ppo"):
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            is_listed = module.removesuffix(".__init__") in listed
            for node in ast.parse(path.read_text()).body:
                match node:
                    case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                        public.update(ast.literal_eval(value))
                        assert is_listed or names.issuperset(ast.literal_eval(value))
                    case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                        documented.update([node.name] * bool(ast.get_docstring(node)))
    assert len(public) > 60
    assert public - {"CONFIGS"} <= documented


@pytest.mark.parametrize("module", [envserve.errors, ppo.errors])
def test_every_error_class_is_explained(module: object) -> None:
    bases = {"EnvserveError", "PpoError"}
    for name, kind in inspect.getmembers(module, inspect.isclass):
        if issubclass(kind, Exception) and kind.__module__ == module.__name__:  # type: ignore[attr-defined]
            assert f"`{name}`" in TROUBLESHOOTING or name in bases, name


@pytest.mark.parametrize("finding", Finding)
def test_every_connection_error_is_explained(finding: Finding) -> None:
    error = connection_error(finding, "tcp://sim1:5555", None)
    if error is not None:
        text = str(error).removeprefix("tcp://sim1:5555: ")
        explained = re.findall(r"^\| `([^`]+)`", TROUBLESHOOTING, re.M)
        starts = [line.partition(" NAME")[0] for line in explained]
        assert any(text.startswith(start) for start in starts), text


def test_functions_and_settings_on_the_algorithm_page_exist() -> None:
    text = (DOCS / "ppo.md").read_text()
    places = re.findall(r"`(ppo/[\w/]+\.py)`((?:,?\s`[\w.]+`)+)", text)
    assert len(places) == len(re.findall(r"`ppo/[\w/]+\.py`", text)) > 20
    for path, names in places:
        source = (ROOT / path).read_text()
        for name in re.findall(r"\w+", names):
            defined = rf"^ *(def|class) {name}\b|^{name}\b"
            assert re.search(defined, source, re.M), (path, name)
    settings = set(re.findall(r"`(\w+_\w+)`", re.sub(r"`ppo/[^`]+`[^.;:]*", "", text)))
    assert settings - {"ratio_deviation"} <= set(Config.__dataclass_fields__)


def test_the_configuration_of_the_site_is_valid_yaml() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert yaml.safe_load(text)["site_name"] == "envserve"
