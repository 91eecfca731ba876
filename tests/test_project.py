"""The whole project: import rules, import times, pins and portable files."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
#: Statement that imports the program and every command's module.
ALL_COMMANDS = (
    "from envserve.cli.app import PROGRAM; [*map(PROGRAM.command, PROGRAM.names)]"
)
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DECLARED = [*PROJECT["dependencies"], *(line for e in EXTRAS.values() for line in e)]
PINNED_LINES = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
NOT_OURS = {
    ".venv",
    ".venv-integration",
    ".venv-floor",
    "runs",
    "build",
    "dist",
    "__pycache__",
    "envserve.egg-info",
}
NOT_OURS |= {".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
#: Extras that `make bench` and `make test-integration` install.
NOT_IN_VENV = {"bench", "envpool", "ray", "sb3", "tianshou", "trainers", "zoo"}
NOT_IN_VENV |= {"browser", "docs", "kubernetes", "release"}
PINS = dict(line.split("==") for line in PINNED_LINES)


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a new interpreter."""
    code = f"{statement}\nimport sys\nprint(*{{n.split('.')[0] for n in sys.modules}})"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    return set(finished.stdout.split())


def project_files() -> list[Path]:
    """Return all files of the project, committed or not, except ignored ones."""
    if not (ROOT / ".git").exists():  # an unpacked archive
        paths = [path for path in ROOT.rglob("*") if path.is_file()]
        return [
            path for path in paths if not NOT_OURS & {*path.relative_to(ROOT).parts}
        ]
    # Git refuses to read another user's checkout by default, which may occur in CI.
    git = ["git", "-c", "safe.directory=*"]
    listed = subprocess.run(
        [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def installed_closure(
    requirement_lines: list[str], *, may_be_absent: bool = False
) -> set[str]:
    """Return the names of all packages that requirements install on this machine."""
    found: set[str] = set()
    pending = [(Requirement(line), "") for line in requirement_lines]
    visited: set[tuple[str, frozenset[str]]] = set()
    while pending:
        requirement, extra = pending.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": extra}):
            continue
        key = (name, frozenset(requirement.extras))
        if key in visited:
            continue
        visited.add(key)
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            if not may_be_absent:
                raise
            continue
        for line in lines:
            pending += [(Requirement(line), e) for e in ("", *requirement.extras)]
    return found


def test_import_rules_hold() -> None:
    finished = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "0 broken" in finished.stdout


@pytest.mark.parametrize("package", ["benchmarks", "envserve", "ppo"])
def test_every_folder_is_a_package_so_that_import_rules_apply(package: str) -> None:
    folders = {file.parent for file in (ROOT / package).rglob("*.py")}
    assert ROOT / package in folders
    assert [f for f in folders if not (f / "__init__.py").is_file()] == []


def test_an_import_rule_forbids_io_in_wire_and_session() -> None:
    contracts = SETTINGS["tool"]["importlinter"]["contracts"]
    rule = next(c for c in contracts if c["name"].startswith("Sessions and formats"))
    wire = (ROOT / "envserve" / "wire").glob("[a-z]*.py")
    modules = {f"envserve.wire.{path.stem}" for path in wire} | {"envserve.session"}
    modules.remove("envserve.wire.sockets")
    assert {"asyncio", "time", "zmq"} <= set(rule["forbidden_modules"])
    missing = modules - set(rule["source_modules"])
    assert not missing, f"add them to the contract {rule['name']!r} in pyproject.toml"


@pytest.mark.parametrize("package", ["envserve", "ppo"])
def test_importing_a_package_loads_no_other_package(package: str) -> None:
    assert loaded_by(f"import {package}") - loaded_by("") == {package}


def test_worker_processes_load_neither_zmq_nor_asyncio() -> None:
    loaded = loaded_by("import envserve.worker.process, envserve.pool.launcher")
    assert loaded & {"zmq", "asyncio", "tensorflow", "keras"} == set()


def test_envserve_loads_no_tensorflow() -> None:
    modules = ("client.batch_env", "server", "cli", "bench.command")
    loaded = loaded_by("\n".join(f"import envserve.{module}" for module in modules))
    assert "envserve" in loaded
    assert loaded & {"tensorflow", "keras", "tensorboard", "ppo"} == set()


def test_importing_ppo_or_benchmarks_loads_no_tensorflow() -> None:
    loaded = loaded_by("import ppo, ppo.evaluation.plot, benchmarks.cli")
    assert loaded & {"tensorflow", "keras"} == set()


def test_importing_all_commands_loads_no_slow_modules() -> None:
    assert loaded_by(ALL_COMMANDS) & {"numpy", "gymnasium", "zmq"} == set()


def test_a_health_probe_does_not_load_numpy() -> None:
    loaded = loaded_by(f"{ALL_COMMANDS}; import envserve.client.link.connection")
    loaded |= loaded_by("import envserve.monitoring.health_probe")
    assert {"envserve", "zmq"} <= loaded
    assert loaded & {"numpy", "gymnasium", "msgpack", "asyncio"} == set()


def test_checking_wrappers_loads_no_gymnasium() -> None:
    loaded = loaded_by("import envserve.wrappers, ppo.config.named_configs")
    assert loaded & {"numpy", "gymnasium", "msgpack", "zmq"} == set()


@pytest.mark.parametrize("package", ["envserve", "ppo"])
def test_the_package_is_marked_as_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("line", sorted(set(DECLARED)))
def test_a_dependency_has_bounds_and_a_pin_within_them(line: str) -> None:
    requirement = Requirement(line)
    operators = {specifier.operator for specifier in requirement.specifier}
    assert ">=" in operators
    assert "<" in operators
    assert Version(PINS[canonicalize_name(requirement.name)]) in requirement.specifier


def test_constraints_contain_only_names_and_versions() -> None:
    wrong = [n for n in PINNED_LINES if not re.fullmatch(r"[a-z0-9-]+==[0-9.]+", n)]
    assert not wrong
    assert len(PINS) == len(PINNED_LINES)
    assert list(PINS) == sorted(PINS)


def test_pre_commit_runs_the_pinned_ruff() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert f"/ruff-pre-commit\n    rev: v{PINS['ruff']}\n" in text


@pytest.mark.parametrize("line", [*PROJECT["dependencies"], *EXTRAS["mujoco"]])
def test_the_lower_bound_of_a_dependency_is_the_version_of_the_floor(line: str) -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints-floor.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    requirement = Requirement(line)
    lowest = [each.version for each in requirement.specifier if each.operator == ">="]
    assert [Version(pins[requirement.name])] == [*map(Version, lowest)]


def test_constraints_pin_everything_that_make_installs() -> None:
    # Both builds of TensorFlow are pinned, but only one can be installed.
    absent = {"train", *NOT_IN_VENV}
    made = [line for name, e in EXTRAS.items() if name not in absent for line in e]
    unpinned = installed_closure([*PROJECT["dependencies"], *made]) - PINS.keys()
    assert not unpinned, "add them to constraints.txt with the version installed"


@pytest.mark.parametrize("extra", sorted(NOT_IN_VENV))
def test_constraints_pin_extras_that_may_not_be_installed(extra: str) -> None:
    # The dependencies of packages that are not installed here cannot be checked.
    unpinned = installed_closure(EXTRAS[extra], may_be_absent=True) - PINS.keys()
    assert not unpinned, "add them to constraints.txt with the version installed"


def test_no_file_names_a_folder_of_one_machine() -> None:
    folders = {str(p) for p in (ROOT, Path.home(), Path(sys.prefix)) if p.parts[1:]}
    personal = re.compile(
        "|".join([r"/(?:home|Users)/\w", *(rf"{re.escape(f)}\b" for f in folders)])
    )
    assert lines_that_match(personal) == []


def test_no_file_names_a_package_registry() -> None:
    registry = re.compile(
        r"index[-_]url|find[-_]links|trusted[-_]host"
        r"|https?://\S*(?:pypi|pythonhosted|registry|/simple\b)"
    )
    assert lines_that_match(registry) == []


def lines_that_match(pattern: re.Pattern[str]) -> list[str]:
    files = project_files()
    assert ROOT / "pyproject.toml" in files
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def test_the_scripts_that_run_all_checks_are_executable() -> None:
    for script in ("scripts/check", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK), script


#: Maximum number of uses of the packages' private names, by test file. These numbers
#: may only decrease.
PRIVATE_USES = """
    broken_servers=6 fake_lane=3 fake_workers=1 fuzzing=1 planted_bugs=3
    planted_worker_bugs=1 test_absence=1 test_action_ring=3
    test_compiled_code=2 test_doctor=14 test_drain=1 test_evaluate=1
    test_fault_log=9 test_launcher=10 test_learners=1 test_lost_blocks=1
    test_metrics_port=1 test_misbehaving_workers=2 test_page=1 test_page_attacked=2
    test_pool=1 test_pool_interrupts=4 test_pool_lifetime=5 test_remote_lane=5
    test_remote_lane_interrupts=4 test_replay=1 test_progress=2
    test_server_pool=1 test_server_loop=7 test_session_reports=1 test_status=3
    test_status_command=2 test_stderr_pipes=8 test_update=1 test_user_envs=3
    test_variable_length_batches=1 test_vector_env=4 test_vector_infos=1
    test_visualize=1 test_zap=6 hijacker=3 trainer=1
"""


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the functions, classes, variables and attributes that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def used_names(tree: ast.AST) -> Iterator[str]:
    """Yield names of attributes, of imports, and of patched attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(str(module), names) if module[:3] in ("env", "ppo"):
                yield from (alias.name for alias in names)
            case ast.Call(func=ast.Attribute(attr="setattr" | "object"), args=args):
                texts = (each.value for each in args if isinstance(each, ast.Constant))
                yield from (str(text).rpartition(".")[2] for text in texts)


def test_tests_use_no_more_private_names_of_the_product() -> None:
    def texts(folder: str) -> Iterator[tuple[str, str]]:
        for path in (ROOT / folder).rglob("*.py"):
            yield path.stem, path.read_text()

    product = [ast.parse(text) for _, text in (*texts("envserve"), *texts("ppo"))]
    names = {name for tree in product for name in defined_names(tree)} - {"_make"}
    private = {name for name in names if re.match("_[^_]", name)}
    found = Counter[str]()
    for file, text in texts("tests"):
        if private.isdisjoint(re.findall(r"\w+", text)):
            continue
        tree = ast.parse(text)
        foreign = private - {*defined_names(tree)}
        found[file] += sum(name in foreign for name in used_names(tree))
    allowed = {file: int(n) for file, n in re.findall(r"(\w+)=(\d+)", PRIVATE_USES)}
    more = {file: n for file, n in found.items() if n > allowed.get(file, 0)}
    assert more == {}, "use public names or constructor arguments instead"
