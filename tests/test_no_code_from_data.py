"""Nothing that comes from another process, or from a file, is run as code.

The first test reads the code; the second one watches a server and a client while they
are sent what nobody should send.
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
#: Where names become modules, and where those names are from.
IMPORTS = {
    "envserve/__init__.py": "a table of what is exported, in that file",
    "envserve/cli/program.py": "the names of commands, listed in app.py",
    "envserve/demo/servers.py": "what its own envs draw with, listed there",
    "envserve/envs/registry.py": "import_modules of the operator; Gymnasium's plugins",
    "envserve/wire/__init__.py": "its own modules, which it lists",
    "envserve/wrappers/apply.py": "the table of wrappers; a name is looked up in it",
    "ppo/config/named_configs.py": "a config of the user's own, in Python",
    "ppo/user_code.py": "what the user's own config names as code of theirs",
}
#: Where a dtype is not written out, and where it is from.
DTYPES = {
    "envserve/spaces/codec.py: name": "a table of names, above",
    "envserve/spaces/leaves.py: space.dtype": "a space that was made already",
    "envserve/spaces/env_spec.py: space.dtype": "a space that was made already",
    "envserve/slab.py: kind": "a tuple of types, beside it",
}


def found_in(path: Path) -> Iterator[str]:
    """What is banned in a file, as text; what needs a reason, with its place."""
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
            if top in MODULES:
                yield f"{place}: import {module}"
            by_name = top in ("importlib", "pkgutil", "imp", "runpy")
            by_name &= module != "importlib.metadata"  # which imports nothing
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
            case ast.Call(func=ast.Attribute(attr="dtype"), args=[of, *_]):
                text = f"{place}: {ast.unparse(of)}"
                if not is_written_out(of) and text not in DTYPES:
                    yield f"{text} as a dtype"


def is_written_out(node: ast.expr) -> bool:
    """Whether a dtype is one of NumPy's by its name, or a list that stands there."""
    match node:
        case ast.Attribute(value=ast.Name(id="np")) | ast.Constant():
            return True
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return all(map(is_written_out, items))
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_data_becomes_code(path: Path) -> None:
    assert not list(found_in(path))


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
def test_what_is_banned_is_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert list(found_in(ROOT / "envserve" / "other.py"))


#: Runs in a process of its own, since a hook stays until its end.
WATCHED = """
import logging, sys
logging.disable(logging.CRITICAL)
from tests.envserve.fuzzing import fuzz, make_targets

targets = make_targets()
fuzz(targets, 20_000, seed=0)  # what is imported or compiled once, is so now
found = []
NAMES = ("import", "exec", "compile", "open", "pickle.", "marshal.", "subprocess.",
         "os.", "ctypes.", "socket.", "shutil.", "code.")

def watch(event, arguments):
    if event.startswith(NAMES):
        found.append((event, repr(arguments)[:200]))

sys.addaudithook(watch)
fuzz(targets, 40_000, seed=1)
seen = found[:]
eval("1")
import this  # both of these are seen
assert {event for event, _ in found} >= {"import", "exec", "compile"}, found
print(len(seen), seen[:5])
"""


def test_nothing_is_run_or_opened_while_strange_messages_are_handled() -> None:
    process = subprocess.run(
        [sys.executable, "-c", WATCHED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "0 []"
