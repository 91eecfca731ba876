"""The README and docs are complete, and mention only things that exist."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import tomllib
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
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TROUBLESHOOTING = (DOCS / "troubleshooting.md").read_text()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_figures_in_the_readme_are_those_of_the_pages_that_it_names() -> None:
    section = README.partition("## Results\n")[2].partition("\n## ")[0]
    figures = section.split("\n* ")
    for figure in figures[1:]:
        (link,) = re.findall(r"\]\(([^)]+)\)", figure)
        page = (ROOT / link).read_text()
        numbers = set(re.findall(r"\d[\d,.]*\d|\d", figure.partition("](")[0]))
        missing = [n for n in numbers if not re.search(rf"\b{re.escape(n)}\b", page)]
        assert missing == [], link
    assert len(figures) == 4


def test_documents_name_the_repository_of_the_project() -> None:
    source = PROJECT["urls"]["Source"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["repository-code"] == source
    assert citation["version"] == PROJECT["version"]
    assert f"git clone {source} && cd envserve\n" in README
    assert f"]({source}/actions/workflows/ci.yml)" in README


def test_images_have_the_version_of_the_project() -> None:
    files = (ROOT / "Dockerfile", ROOT / "docker-compose.yml", DOCS / "cluster.md")
    for file in files:
        named = re.findall(r"ghcr\.io/envserve/envserve-\w+:(\S+)\b", file.read_text())
        assert set(named) == {PROJECT["version"]}, file


def test_the_changelog_has_a_dated_section_for_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\S+)\] - (\S+)$", changelog, re.M)
    assert released[0][0] == PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["date-released"]) == released[0][1]


def test_the_page_of_settings_is_current() -> None:
    """The page is written by scripts/generate_reference.py."""
    assert PAGE.read_text() == page()


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"[\w-]+\.(?:md|ipynb)", nav)
    pages = [path.name for path in DOCS.iterdir() if path.suffix in (".md", ".ipynb")]
    assert sorted(listed) == sorted(pages)


def test_links_lead_to_files_of_the_repository() -> None:
    """MkDocs checks anchors, and links between the pages of the site."""
    ours = r"https://(?:github|raw\.githubusercontent)\.com/envserve/envserve/"
    link = re.compile(
        rf"\]\(({ours}(?:(?:blob|tree|raw)/)?main/)?([^)#:\s]+)(?:#[^)\s]*)?\)"
    )
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    places = [
        (ROOT if absolute else page.parent) / path
        for page in pages
        for absolute, path in link.findall(page.read_text())
    ]
    assert len(places) > 200
    assert [place for place in places if not place.exists()] == []


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


def test_the_help_of_the_package_has_an_example_that_runs() -> None:
    text = envserve.__doc__ or ""
    assert len(text.splitlines()) <= 15
    assert all(f"`{name}`" in text for name in ("make_vec", "make", "BatchEnv"))
    result = doctest.testmod(envserve)
    assert result.attempted >= 5
    assert not result.failed
    assert {*envserve.__all__} <= {*dir(envserve)}


def test_texts_in_the_packages_name_pages_by_their_titles() -> None:
    """Installed packages contain no docs, so a path to a page would be of no use."""
    titles = {path.read_text().partition("\n")[0][2:] for path in DOCS.glob("*.md")}
    named = set()
    for package in ("envserve", "ppo"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    text = " ".join(node.value.split())
                    assert not re.search(r"docs/|\.md\b", text), (path, text)
                    named.update(re.findall(r"[\"']([A-Z][^\"']+). in the docs", text))
    assert len(named) > 10
    assert named <= titles


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
