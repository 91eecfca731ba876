"""Start Python processes quickly and safely; find this package's commit.

With `-c` or `-m`, Python searches the working directory for modules first, so the child
would run a file there that has the name of a module. `-P` prevents this; processes that
envs start do not inherit this option.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from envserve.envs.user_envs import working_directory, writable_by_others
from envserve.text import clone_folder

#: Folder from which this process and its child processes import envserve.
_ROOT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def python_command(
    code: str, *arguments: str, path: Sequence[str] | None = None
) -> list[str]:
    """Return a command line that runs Python statements in a new interpreter.

    Its `sys.path` is `path`; by default, the search path of a new interpreter, and this
    package. It gets the options of this interpreter, such as `-O` and `-W`.
    """
    import subprocess  # imported here because health probes do not need it

    default = f"{_ROOT!r} in sys.path or sys.path.insert(0, {_ROOT!r})"
    set_path = default if path is None else f"sys.path[:] = {[*path]!r}"
    # multiprocessing calls this function for the same purpose.
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    code = f"import sys; {set_path}\n{code}"
    return [sys.executable, *options, "-P", "-c", code, *arguments]


def main_command(
    module: str,
    *arguments: str,
    path: Sequence[str] | None = None,
    ends_with_parent: bool = False,
) -> list[str]:
    """Return a command line that calls a module's `main`; see `python_command`.

    If `ends_with_parent`, the process receives SIGTERM when the thread that starts it
    exits; this works only on Linux.
    """
    death_signal = "import ctypes; getattr(ctypes.CDLL(None), 'prctl', max)(1, 15)"
    code = f"from {module} import main; main()"
    code = f"{death_signal}; {code}" if ends_with_parent else code
    return python_command(code, *arguments, path=path)


def search_path() -> list[str]:
    """Return the folders in which this process looks for modules, as absolute paths.

    Python adds the working directory in front when it runs `-c`, `-m`, a prompt or a
    notebook. This function moves it to the end, so that its files shadow no other
    module, and omits it if other users can write to it, or if it is not accessible.
    """
    # Python ignores entries of other types, such as None.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    main = sys.modules.get("__main__")
    working_dir = working_directory()
    is_script = hasattr(main, "__file__") and getattr(main, "__spec__", None) is None
    is_added = "" in path or not (is_script or sys.flags.safe_path)
    if is_added and working_dir != _ROOT:
        if "" not in path and working_dir in path:
            # Remove only one entry, because PYTHONPATH may also contain the folder.
            path.remove(working_dir)
        path = [entry for entry in path if entry]
        if working_dir and not writable_by_others(working_dir):
            path.append(working_dir)
    return [os.path.normpath(os.path.join(working_dir, entry)) for entry in path]


@contextlib.contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import the modules of the block without garbage collection.

    All objects that exist at the end of the block are excluded from later collections:
    most of them are needed until the process exits, and a collection would visit them.
    If garbage collection is disabled already, this does nothing.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.freeze()
            gc.enable()


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a process, without SIGHUP if it is ignored.

    A closed terminal sends SIGHUP; programs that `nohup` starts ignore it.
    """
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return numbers


def build_commit() -> str:
    """Return the short hash of the commit that this package is from; "" if unknown.

    In a clone, git returns the hash; other installations contain a file with it.
    """
    import subprocess  # imported here because health probes do not need it

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (folder := clone_folder()) and (folder / ".git").exists():
            command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
            return subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=2.0
            ).stdout.strip()
        return Path(__file__).with_name("commit.txt").read_text().strip()
    return ""


def restart_with_safe_path(module: str) -> None:
    """Replace this process with one that runs a module's `main` with `-P`.

    multiprocessing passes `-P` on to the processes that it starts.
    """
    if not sys.flags.safe_path:
        python, *rest = main_command(module, *sys.argv[1:], path=search_path())
        os.execv(python, [python, *rest])
