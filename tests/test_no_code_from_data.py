"""Data from other processes or from files is never run as code.

The first test searches the source; the last one audits a server and a client while they
receive malformed messages.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(p for top in ("envserve", "ppo") for p in (ROOT / top).rglob("*.py"))
MODULES = frozenset(
    {
        *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal"),
        *("shelve", "dbm", "code", "codeop", "jsonpickle"),
    }
)
NAMES = frozenset({"eval", "exec", "compile", "__import__", "execfile"})
ATTRIBUTES = frozenset(
    {
        *("recv_pyobj", "send_pyobj", "recv_serialized", "allow_pickle", "unsafe_load"),
        *("literal_eval", "system", "popen", "find_class"),
    }
)
#: Files that import modules by name, and where the names come from.
IMPORTS = {
    "envserve/__init__.py": "a table of the exported names in that file",
    "envserve/cli/options.py": "searches modules that the operator names",
    "envserve/cli/program.py": "the names of a program's commands, which it lists",
    "envserve/demo/servers.py": "a list of rendering modules in that file",
    "envserve/envs/registry.py": "import_modules of the operator; Gymnasium's plugins",
    "envserve/wire/__init__.py": "a list of its own modules",
    "envserve/wrappers/apply.py": "the table of wrappers; a name is looked up in it",
    "ppo/cli/train.py": "looks for installed packages that it names",
    "ppo/config/named_configs.py": "the user's config, in Python",
    "ppo/evaluation/rendering.py": "looks for an installed package that it names",
    "ppo/user_code.py": "user code that the user's config names",
}
#: Files that unpickle data, and the process that has pickled it.
PICKLES = {
    "envserve/envs/pickled_code.py": "the user's process, for workers that it starts",
}
#: Expressions of dtypes that are not literals, and the source of their values.
DTYPES = {
    "envserve/spaces/codec.py: name": "a table of allowed names",
    "envserve/spaces/info_columns.py: fields": "dtypes of the table in codec.py",
    "envserve/spaces/leaves.py: space.dtype": "an existing space",
    "envserve/spaces/env_spec.py: space.dtype": "an existing space",
    "envserve/slab.py: kind": "a tuple of types in that file",
}


def found_in(path: Path) -> Iterator[str]:
    """Yield the banned names in a file, except those with a reason above."""
    place = path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                modules = [name.name for name in names]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case _:
                modules = []
        for module in modules:
            top = module.partition(".")[0]
            if top in MODULES and place not in PICKLES:
                yield f"{place}: import {module}"
            by_name = top in ("importlib", "pkgutil", "imp", "runpy")
            by_name &= module != "importlib.metadata"  # imports no modules
            if by_name and place not in IMPORTS:
                yield f"{place}: imports by name"
        match node:
            case ast.Name(id=name) if name in NAMES:
                yield f"{place}: {name}"
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                yield f"{place}: .{name}"
            case ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "load_all"):
                yield f"{place}: yaml.load"
            case ast.keyword(arg="allow_pickle" | "shell"):
                yield f"{place}: {node.arg}"
            case ast.Call(func=ast.Attribute(attr="dtype"), args=[argument, *_]):
                text = f"{place}: {ast.unparse(argument)}"
                if not is_literal(argument) and text not in DTYPES:
                    yield f"{text} as a dtype"


def is_literal(node: ast.expr) -> bool:
    """Return whether a dtype is a name of NumPy, a constant, or a list of these."""
    match node:
        case ast.Attribute(value=ast.Name(id="np")) | ast.Constant():
            return True
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return all(map(is_literal, items))
    return False


def test_no_data_becomes_code() -> None:
    assert len(FILES) > 100
    assert [found for path in FILES for found in found_in(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from marshal import loads", "eval(x)", "exec(x)"),
        *("socket.recv_pyobj()", "np.load(f, allow_pickle=True)", "yaml.load(x)"),
        *(
            "import importlib",
            "np.dtype(name)",
            "__import__(x)",
            "compile(x, '', 'exec')",
        ),
        *("subprocess.run(x, shell=True)", "os.system(x)", "f = eval"),
    ],
)
def test_banned_names_are_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert list(found_in(ROOT / "envserve" / "other.py"))


#: Code for a separate process, because audit hooks cannot be removed.
AUDITED = """
import logging, sys
logging.disable(logging.CRITICAL)
from tests.envserve.fuzzing import fuzz, make_targets

targets = make_targets()
fuzz(targets, 20_000, seed=0)  # causes all imports and compilations that happen once
found = []
NAMES = ("import", "exec", "compile", "open", "pickle.", "marshal.", "subprocess.",
         "os.", "ctypes.", "socket.", "shutil.", "code.")

def audit(event, arguments):
    if event.startswith(NAMES):
        found.append((event, repr(arguments)[:200]))

sys.addaudithook(audit)
fuzz(targets, 40_000, seed=1)
during_fuzzing = found[:]
eval("1")
import this  # the hook finds both
assert {event for event, _ in found} >= {"import", "exec", "compile"}, found
print(len(during_fuzzing), during_fuzzing[:5])
"""


def test_malformed_messages_run_no_code_and_open_no_files() -> None:
    process = subprocess.run(
        [sys.executable, "-c", AUDITED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "0 []"
