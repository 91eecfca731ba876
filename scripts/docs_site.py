"""Hooks for MkDocs, which builds the docs site; mkdocs.yml names this file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
#: Maps sections of the docs to factors for the search ranks of their pages.
_SEARCH_BOOSTS = {"Get started": 4, "Explanation": 0.5, "Developers": 0.1}


def on_config(config: Any) -> None:
    """Show the release in the footer of all pages."""
    project = tomllib.loads(_PROJECT.read_text())["project"]
    config.copyright = f"envserve {project['version']}, {project['license']}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Set the rank of the page in search results according to its section."""
    for section in page.ancestors:
        page.meta["search"] = {"boost": _SEARCH_BOOSTS.get(section.title, 1)}
    return markdown
