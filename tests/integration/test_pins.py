"""Every package that `make test-integration` installs is pinned."""

from __future__ import annotations

import sysconfig
from importlib.metadata import distributions

from packaging.utils import canonicalize_name

from tests.test_project import PINS

#: The project itself, and the package that venv installs.
NO_PINS = {"envserve", "pip"}


def test_every_installed_package_is_pinned() -> None:
    # Search only this folder: Ray bundles packages in another one.
    found = distributions(path=[sysconfig.get_path("purelib")])
    installed = {str(canonicalize_name(each.name)): each.version for each in found}
    for name in NO_PINS:
        installed.pop(name)
    differing = {
        name: version
        for name, version in installed.items()
        if PINS.get(name) != version.partition("+")[0]
    }
    assert not differing, "add them to constraints.txt with the version installed"
