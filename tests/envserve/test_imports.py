"""Effects of importing env modules, and the state that forked workers inherit."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.envs import registry
from envserve.errors import EnvStartError
from tests.envserve.conftest import Serve, WaitUntil

ENV = """
import gymnasium
import numpy as np

class Draw(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def draw(self):
        return 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.draw()], float), {}

    def step(self, action):
        return np.array([self.draw()], float), 0.0, False, False, {}
"""
#: Definitions of `draw`, each with its generator in another place, by that place.
GENERATORS = {
    "module": "draw = lambda: random.random()",
    "numpy": "draw = lambda: np.random.rand()",
    "generator": "RNG = np.random.default_rng(3); draw = lambda: RNG.random()",
    "other bits": (
        "RNG = np.random.Generator(np.random.Philox(3)); draw = lambda: RNG.random()"
    ),
    "bit generator": (
        "BITS = np.random.PCG64(3); draw = lambda: BITS.random_raw() % 1000003"
    ),
    "state": "RNG = np.random.RandomState(3); draw = lambda: RNG.rand()",
    "state of other bits": (
        "RNG = np.random.RandomState(np.random.SFC64(3)); draw = lambda: RNG.rand()"
    ),
    "random": "RNG = random.Random(3); draw = lambda: RNG.random()",
    "class": "class C:\n    rng = random.Random(3)\ndraw = lambda: C.rng.random()",
    "object": (
        "class C:\n    def __init__(self): self.rng = np.random.default_rng(3)\n"
        "WORLD = C(); draw = lambda: WORLD.rng.random()"
    ),
    "list": "RNGS = [{'a': random.Random(3)}]; draw = lambda: RNGS[0]['a'].random()",
    "default": "def draw(rng=np.random.default_rng(3)): return rng.random()",
    "keyword": "def draw(*, rng=random.Random(3)): return rng.random()",
    "closure": (
        "def make():\n    rng = random.Random(3)\n    return lambda: rng.random()\n"
        "draw = make()"
    ),
    "bound method": "draw = random.Random(3).random",
    "bound method of numpy": "draw = np.random.default_rng(3).random",
    "partial": "draw = functools.partial(np.random.default_rng(3).normal, 1.0)",
    "space": (
        "SPACE = gymnasium.spaces.Box(0, 1, (1,), seed=3)\n"
        "draw = lambda: SPACE.sample()[0]"
    ),
    "other reference": (
        "class Hidden: __slots__ = ('rng',)\n"
        "H = Hidden(); RNG = H.rng = np.random.default_rng(3)\n"
        "draw = lambda: H.rng.random()"
    ),
    "other file": "from helpers.noise import draw",
    "namespace": (
        "import types; N = types.SimpleNamespace(rng=random.Random(3))\n"
        "draw = lambda: N.rng.random()"
    ),
    "mapping": (
        "import types; M = types.MappingProxyType({'a': random.Random(3)})\n"
        "draw = lambda: M['a'].random()"
    ),
    "thread": (
        "import threading; T = threading.local(); T.rng = random.Random(3)\n"
        "draw = lambda: T.rng.random()"
    ),
    "cached function": (
        "@functools.lru_cache\ndef get(): return random.Random(3)\n"
        "get(); draw = lambda: get().random()"
    ),
    "running generator": (
        "def noise():\n    rng = random.Random(3)\n    while True: yield rng.random()\n"
        "N = noise(); next(N); draw = lambda: next(N)"
    ),
    "iterator": (
        "import itertools; C = itertools.cycle([random.Random(3)])\n"
        "draw = lambda: next(C).random()"
    ),
    "spawned": (
        "RNG = np.random.default_rng(3); draw = lambda: RNG.spawn(1)[0].random()"
    ),
    "seed sequence": (
        "S = np.random.SeedSequence(3)\n"
        "draw = lambda: np.random.default_rng(S.spawn(1)[0]).random()"
    ),
    "behind many numbers": (
        "ANGLES = [[n / 3 for n in range(500)] for _ in range(50)]\n"
        "RNGS = [[[[random.Random(3)]]]]; draw = lambda: RNGS[0][0][0][0].random()"
    ),
    "among many numbers": (
        "PARTS = {f'part {n}': n for n in range(2000)}; PARTS['a'] = random.Random(3)\n"
        "draw = lambda: PARTS['a'].random()"
    ),
    "among many globals": (
        "globals().update({f'name_{n}': object() for n in range(2000)})\n"
        "RNG = np.random.default_rng(3); draw = lambda: RNG.random()"
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the test's env files."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "draw_base.py").write_text(ENV)
    return tmp_path


def write_env(folder: Path, text: str, name: str = "draw_env") -> str:
    path = folder / f"{name}.py"
    path.write_text(f"import functools, random\nfrom draw_base import *\n{text}\n")
    return str(path)


def test_workers_draw_different_numbers_that_depend_on_the_seed_only(
    folder: Path,
) -> None:
    (folder / "helpers").mkdir()
    helper = "import random\nRNG = random.Random(3)\ndraw = RNG.random\n"
    (folder / "helpers" / "noise.py").write_text(helper)
    names = [place.replace(" ", "_") + "_place" for place in GENERATORS]
    for name, text in zip(names, GENERATORS.values(), strict=True):
        write_env(folder, text, name)
    text = f"import {', '.join(names)}\n"
    text += f"class E(Draw):\n    places = [{', '.join(names)}]\n"
    text += "    def draws(self): return [float(each.draw()) for each in self.places]"
    env = write_env(folder, text)
    drawn = []
    for seed in (5, 5, 6):
        with BatchEnv.local(f"{env}:E", 2, 2, seed=seed) as batch:
            drawn.append([batch.call_each("draws"), batch.call_each("draws")])
    assert drawn[0] == drawn[1]
    values = np.array([drawn[0], drawn[2]]).reshape(8, len(names))
    for name, column in zip(names, values.T, strict=True):
        assert len({*column}) == 8, f"{name}: {column}"


@pytest.mark.parametrize("package_file", ["__init__.py", "other.py"])
def test_generators_in_other_folders_of_a_project_are_seeded(
    package_file: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("draw_package", "noise_package"):
        (folder / name).mkdir()
        (folder / name / package_file).touch()
    (folder / "draw_package" / "envs.py").write_text(
        "from draw_base import Draw\nfrom noise_package.noise import draw\n"
        "class E(Draw):\n    def draw(self): return draw()"
    )
    (folder / "noise_package" / "noise.py").write_text(
        "import random\nRNG = random.Random(3)\ndef draw(): return RNG.random()"
    )
    monkeypatch.syspath_prepend(str(folder))
    with BatchEnv.local("draw_package.envs:E", 2, 2) as batch:
        assert np.unique(batch.reset()).size == 2


def test_generators_of_libraries_keep_their_state(folder: Path) -> None:
    site = folder / "site-packages" / "some_library"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("import random\nRNG = random.Random(3)\n")
    text = (
        f"import sys; sys.path.append({str(site.parent)!r}); import some_library\n"
        "class E(Draw):\n    def draw(self): return some_library.RNG.random()"
    )
    with BatchEnv.local(f"{write_env(folder, text)}:E", 1, 1) as batch:
        assert batch.reset() == random.Random(3).random()


def test_proxies_in_modules_are_not_loaded(folder: Path) -> None:
    text = """
class Proxy:
    @property
    def __class__(self): raise RuntimeError("not configured")
SETTINGS = Proxy(); RNG = np.random.default_rng(3)
class E(Draw):
    def draw(self): return RNG.random()
"""
    with BatchEnv.local(f"{write_env(folder, text)}:E", 2, 2) as batch:
        assert np.unique(batch.reset()).size == 2


POOL = """
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()
class E(Draw):
    def draw(self): return POOL.submit(float, 7).result()
class Waits(Draw):
    def step(self, action): return POOL.submit(super().step, action).result()
class Starts(E):
    def __init__(self): self.draw()
class Raises(Draw):
    def __init__(self): raise RuntimeError("cannot re-initialise")
"""


def reset_and_step(batch: BatchEnv) -> None:
    batch.reset()
    batch.step([0, 0])


@pytest.mark.parametrize(
    ("name", "timeouts"),
    [("E", {"reset_timeout": 4.0}), ("Waits", {"step_timeout": 4.0})],
)
def test_env_that_needs_a_thread_of_its_import_fails_at_once_with_the_reason(
    folder: Path, name: str, timeouts: dict[str, Any]
) -> None:
    env = write_env(folder, POOL)
    with (
        BatchEnv.local(f"{env}:{name}", 2, 2, **timeouts) as batch,
        pytest.raises(EnvStartError) as caught,
    ):
        reset_and_step(batch)
    text = str(caught.value)
    assert "importing draw_env.py started 1 thread" in text.partition("stderr")[0]
    assert "preload=False (--no-preload)" in text
    assert "in a row" not in text


@pytest.mark.parametrize("name", ["Starts", "Raises"])
def test_env_that_cannot_be_built_names_the_threads_of_its_import(
    folder: Path, name: str
) -> None:
    env = write_env(folder, POOL)
    with pytest.raises(EnvStartError, match=r"importing draw_env\.py started 1 "):
        BatchEnv.local(f"{env}:{name}", 1, 1, reset_timeout=4.0)


def test_env_that_needs_a_thread_of_its_import_works_without_preload(
    folder: Path,
) -> None:
    env = f"{write_env(folder, POOL)}:Starts"
    with BatchEnv.local(env, 2, 2, preload=False) as batch:
        assert batch.reset().tolist() == [[7.0], [7.0]]
        assert batch.call_each("draw") == [7.0, 7.0]


def test_a_mocked_torch_has_no_generators_to_seed(folder: Path) -> None:
    text = "import sys, unittest.mock; sys.modules['torch'] = unittest.mock.MagicMock()"
    env = write_env(folder, f"{text}\nclass E(Draw): pass")
    BatchEnv.local(f"{env}:E", 1, 1).close()


#: Mocks of packages that are not installed.
MOCKS = """
import sys, types
class Anything:
    def __getattr__(self, name): return Anything()
class Missing(types.ModuleType):
    def __getattr__(self, name): raise ImportError(f"install it to use {name}")
for name in ("pybullet", "tensorflow.compat"):
    sys.modules[name] = Anything()
for name in ("torch", "jax"):
    sys.modules[name] = Missing(name)
sys.modules["glfw"] = None
"""


def test_mocks_of_modules_do_not_prevent_the_start(folder: Path) -> None:
    text = f"{MOCKS}\nRNG = random.Random(3)\n"
    text += "class E(Draw):\n    def draw(self): return RNG.random()"
    with BatchEnv.local(f"{write_env(folder, text)}:E", 2, 2) as batch:
        assert np.unique(batch.reset()).size == 2


def test_generators_beside_objects_of_an_unhashable_class_are_seeded(
    folder: Path,
) -> None:
    text = """
class Comparable(type):
    def __eq__(cls, other): return cls is other
class Part(metaclass=Comparable): pass
PARTS = [Part(), random.Random(3)]
class E(Draw):
    def draw(self): return PARTS[1].random()
"""
    with BatchEnv.local(f"{write_env(folder, text)}:E", 2, 2) as batch:
        assert np.unique(batch.reset()).size == 2


def test_a_generator_that_rejects_seeds_keeps_its_state(folder: Path) -> None:
    text = """
class Fixed(random.Random):
    def seed(self, a=None):
        if a is not None: raise NotImplementedError
ONE = Fixed(); RNG = random.Random(3)
class E(Draw):
    def draw(self): return RNG.random()
"""
    with BatchEnv.local(f"{write_env(folder, text)}:E", 2, 2) as batch:
        assert np.unique(batch.reset()).size == 2


EXITS = {
    "SystemExit": "import sys\nprint('please install it'); sys.exit(1)",
    "SystemExit: go away": "raise SystemExit('go away')",
    "SystemExit: 2": (
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('file'); parser.parse_args()"
    ),
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "BaseException: all": "raise BaseException('all')",
    "SilentError: <exception str() failed>": (
        "class SilentError(Exception):\n"
        "    def __str__(self): raise RuntimeError\n"
        "raise SilentError"
    ),
}


ENDS = {
    "exited with code 3": "os._exit(3)",
    "exited with code 0": "os.fork() and os._exit(0)",
    # A process that takes more than a second to notice that is killed.
    "exited with code 1|was killed by SIGKILL": "os.closerange(3, 100)",
    "was killed by SIGSEGV": "os.kill(os.getpid(), signal.SIGSEGV)",
}
STOPS = {"was suspended by a signal": "os.kill(os.getpid(), signal.SIGSTOP)"}


@pytest.mark.parametrize(
    ("expected", "text", "preload"),
    [
        *((*end, True) for end in (ENDS | STOPS).items()),
        # A worker that a signal has stopped is retried after the reset timeout.
        *((*end, False) for end in ENDS.items()),
    ],
)
def test_import_that_ends_its_process_is_tried_once_and_named(
    folder: Path, expected: str, text: str, preload: bool
) -> None:
    env = write_env(folder, f"import os, signal; {text}")
    with pytest.raises(EnvStartError) as caught:
        BatchEnv.local(f"{env}:E", 2, 2, preload=preload)
    error = str(caught.value)
    assert re.search(expected, error)
    # If only the descriptors are closed, the template ends later, in the import of E.
    assert f"{Path(env).stem}" in error.partition("while it imported ")[2]
    assert "in a row" not in error


@pytest.mark.parametrize(
    ("end", "options"),
    [("exited with code 3", ()), ("was killed by SIGSEGV", ("--no-preload",))],
)
def test_server_whose_import_ends_its_process_exits_with_an_error(
    folder: Path, end: str, options: tuple[str, ...]
) -> None:
    env = write_env(folder, f"import os, signal; {ENDS[end]}")
    bind = "--bind", f"ipc://{folder}/socket"
    words = [sys.executable, "-m", "envserve", "start", f"{env}:E", *bind, *options]
    run = subprocess.run(words, capture_output=True, text=True, timeout=90)
    assert (run.returncode, run.stdout) == (2, "")
    *_, line = run.stderr.splitlines()
    assert line.startswith("Error: ")
    assert re.search(f"({end}) while it imported {env}:E", line)


FORKS = {
    "import": "os.fork()",
    "import of a thread": (
        "import threading; THREAD = threading.Thread(target=os.fork)\n"
        "THREAD.start(); THREAD.join()"
    ),
    "constructor": "class E(E):\n    def __init__(self): os.fork()",
}


@pytest.mark.parametrize(
    ("place", "preload"), [*((place, True) for place in FORKS), ("import", False)]
)
def test_forked_copies_of_a_process_end_and_the_process_works(
    folder: Path, place: str, preload: bool
) -> None:
    text = f"import os\nclass E(Draw): pass\n{FORKS[place]}"
    env = f"{write_env(folder, text)}:E"
    with BatchEnv.local(env, 2, 2, preload=preload) as batch:
        batch.reset()
        for _ in range(5):
            assert batch.step(np.zeros(2, np.int64)).valid.all()


PATCHES = """
import os, select, signal, socket, sys, time

def replaced(*args, **kwargs): raise RuntimeError("needs an event loop")

def patch(module, *names):
    for name in names: setattr(module, name, replaced)

patch(os, "fork", "read", "waitid", "waitpid", "write")
patch(select, "poll", "select")
patch(signal, "signal")
patch(socket, "socket")
clocks = "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time"
CLOCKS = {id(getattr(time, name)) for name in clocks}
for name, module in [*sys.modules.items()]:
    if not name.startswith(("multiprocessing", "queue", "threading")):
        values = [*vars(module).items()]
        patch(module, *[key for key, value in values if id(value) in CLOCKS])
"""


@pytest.mark.parametrize("preload", [True, False])
def test_functions_that_an_import_replaces_are_not_used_in_workers(
    folder: Path, capfd: pytest.CaptureFixture[str], preload: bool
) -> None:
    """Gevent and eventlet replace functions of the standard library.

    Freezegun replaces clocks, in all modules that have imported them.
    """
    text = f"""
{PATCHES}
class E(Draw):
    def step(self, action):
        print("hello")
        if action: os._exit(3)
        return super().step(action)
"""
    env = f"{write_env(folder, text)}:E"
    with BatchEnv.local(env, 2, 2, preload=preload, padding_after=60.0) as batch:
        batch.reset()
        assert batch.step(np.array([1, 0])).valid.tolist() == [False, True]
        assert batch.step(np.zeros(2, np.int64)).valid.all()
    assert "hello" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pool_of_processes_of_an_import_ends_with_the_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", str(folder))
    text = "import multiprocessing\nPOOL = multiprocessing.Pool(2)\n"
    text += "POOL.map(abs, [1])\nclass E(Draw): pass"
    with BatchEnv.local(f"{write_env(folder, text)}:E", 2, 2) as batch:
        batch.reset()
        assert len(marked_processes(folder)) == 5
    assert not marked_processes(folder)


def marked_processes(folder: Path) -> list[Path]:
    """Return the running processes with a variable MARK in their environment."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"MARK={folder}\0".encode() in environment.read_bytes():
                found.append(environment.parent)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="lists shared memory")
@pytest.mark.parametrize("place", ["module", "constructor"])
def test_shared_memory_of_killed_workers_is_removed_at_the_end(
    folder: Path, wait_until: WaitUntil, place: str
) -> None:
    line = "from multiprocessing.shared_memory import SharedMemory"
    text = f"""
import os
import re
{line if place == "module" else ""}
class E(Draw):
    def __init__(self):
        {line}
        self.memory = SharedMemory(create=True, size=1)
    def name(self): return self.memory.name
    def step(self, action): os._exit(3)
"""
    with BatchEnv.local(f"{write_env(folder, text)}:E", 1, 1) as batch:
        batch.reset()
        names = batch.call_each("name")
        batch.step(np.zeros(1, np.int64))
        names += batch.call_each("name")
        paths = [Path("/dev/shm", name) for name in names]
        assert paths[-1].exists()
    wait_until(lambda: not any(path.exists() for path in paths))


@pytest.mark.skipif(sys.platform != "linux", reason="uses MADV_DONTFORK")
def test_forked_child_that_returns_from_a_step_writes_to_no_row(folder: Path) -> None:
    text = """
import os
class E(Draw):
    t, is_child = 0, False
    def draw(self): return self.t
    def step(self, action):
        self.t += 1
        if action == 1:
            (go, E.go), (E.done, done) = os.pipe(), os.pipe()
            if os.fork() == 0:
                E.is_child = True
                os.read(go, 1)  # then return from this step
            else:
                os.close(done)
        elif action == 2:
            if E.is_child: os._exit(0)
            os.write(E.go, b"x")
            os.read(E.done, 1)  # until the child has ended
        return super().step(action)
E.action_space = gymnasium.spaces.Discrete(3)
"""
    with BatchEnv.local(f"{write_env(folder, text)}:E", 2, 1) as batch:
        batch.reset()
        for actions, expected in (([1, 0], 1), ([0, 2], 2), ([0, 0], 3)):
            step = batch.step(np.array(actions))
            assert step.valid.all()
            assert step.observation.tolist() == [[expected], [expected]]


@pytest.mark.parametrize(
    ("expected", "preload"), [*((text, True) for text in EXITS), ("SystemExit", False)]
)
def test_import_that_exits_is_tried_once_and_reported(
    folder: Path, capfd: pytest.CaptureFixture[str], expected: str, preload: bool
) -> None:
    env = write_env(folder, EXITS[expected])
    with pytest.raises(EnvStartError) as caught:
        BatchEnv.local(f"{env}:E", 1, 1, preload=preload)
    text = str(caught.value)
    assert expected in text
    assert "in a row" not in text
    assert "importing" in text
    if expected != "KeyboardInterrupt":
        assert f"({env}:" in text
    output = capfd.readouterr()
    assert (output.out + output.err).count("please install it") <= 1


def test_modules_and_envs_that_parse_arguments_see_none_of_envserve(
    folder: Path,
) -> None:
    text = """
import argparse, sys
parser = argparse.ArgumentParser(); parser.parse_args()
NAME = sys.argv[0]
class E(Draw):
    def __init__(self): parser.parse_args()
    def name(self): return [NAME, len(sys.argv)]
"""
    env = write_env(folder, text)
    with BatchEnv.local(f"{env}:E", 1, 1) as batch:
        assert batch.call_each("name") == [[env, 1]]
    arguments = [*sys.argv]
    registry.import_env_modules([env])
    assert sys.argv == arguments


def test_constructor_that_exits_is_tried_once(folder: Path) -> None:
    env = write_env(
        folder, "class E(Draw):\n    def __init__(self): raise SystemExit(3)"
    )
    with pytest.raises(EnvStartError, match="SystemExit: 3") as caught:
        BatchEnv.local(f"{env}:E", 1, 1)
    assert "in a row" not in str(caught.value)


def test_server_without_preload_drains_after_an_import_that_sets_signal_handlers(
    folder: Path, serve: Serve
) -> None:
    log = folder / "log"
    text = f"""
import os, signal, socket
open({str(log)!r}, "a").write(f"{{os.getpid()}} ")
A, B = socket.socketpair(); A.setblocking(False)
signal.set_wakeup_fd(A.fileno())
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGCHLD}})
class E(Draw):
    def pid(self): return os.getpid()
"""
    env = write_env(folder, text)
    options = f"{env}:E", "--no-preload", "--expose", "pid", "--drain-grace", "0"
    server = serve(*options, bind=(f"ipc://{folder}/socket",), imports=())
    with BatchEnv.connect("draw_env:E", [server.address], 2) as batch:
        pids = {*batch.call_each("pid")}
        imported = {*map(int, log.read_text().split())}
        assert pids < imported
        assert len(imported) == 1 + len(pids)  # a process lists the names
        assert server.process.pid not in imported
    server.signal(signal.SIGTERM)
    assert "stopping" in server.end()
    assert server.process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="detected by waitid")
def test_env_that_stops_the_template_costs_each_row_one_transition(
    folder: Path,
) -> None:
    text = """
import os, signal
class E(Draw):
    def step(self, action):
        if action == 1: os.kill(os.getppid(), signal.SIGSTOP); os._exit(1)
        return super().step(action)
"""
    with BatchEnv.local(
        f"{write_env(folder, text)}:E", 2, 2, padding_after=60.0
    ) as batch:
        batch.reset()
        num_lost = np.zeros(2, np.int64)
        for actions in ([1, 0], [0, 0], [0, 0]):
            num_lost += ~batch.step(np.array(actions)).valid
        assert num_lost.tolist() == [1, 1]
