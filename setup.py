"""Add the commit and the long description to packages; see pyproject.toml for the rest.

A build from a git checkout writes the commit to `envserve/commit.txt` in the package. A
build from an sdist keeps the file that the sdist contains.
"""

import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
# Python 3.10 has no tomllib, and pip must get as far as reading `requires-python`.
SETTINGS = dict(
    re.findall(
        '^(version|Source) = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M
    )
)


def write_commit(folder: Path) -> None:
    """Write the short hash of the checkout's commit, if this is a git checkout."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            (folder / "envserve" / "commit.txt").write_text(done.stdout)


class BuildPackages(build_py):
    """Add the commit to a build, but not to the source of an editable installation."""

    def run(self) -> None:
        """Copy the packages and write the commit."""
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib))


class BuildSource(sdist):
    """Add the commit to the sdist."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files and write the commit."""
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


def long_description() -> str:
    """Return README.md with links and images that a package index can resolve."""
    source, tag = SETTINGS["Source"], f"v{SETTINGS['version']}"
    raw = source.replace("github.com", "raw.githubusercontent.com")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{raw}/{tag}/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{source}/blob/{tag}/", text)


setup(
    cmdclass={"build_py": BuildPackages, "sdist": BuildSource},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
