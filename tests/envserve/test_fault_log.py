"""Each fault is logged in one line with all the data needed to replay it."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from envserve.client import BatchEnv
from envserve.crashes.action_ring import ActionRing
from envserve.envs.seeding import env_seed
from envserve.errors import EnvError
from envserve.lane import Reset
from envserve.pool.fault_log import FaultLog
from envserve.pool.launcher import Launcher
from envserve.pool.replay import load_repro
from envserve.pool.worker_states import Lost
from envserve.slab import Status
from envserve.spaces import codec
from tests.envserve.session_fakes import make_call

from .pool_driver import (
    FAULTY,
    LEDGER,
    SCRIPT,
    SEED,
    PoolMaker,
    gather,
    kill,
    launcher_with,
    reset,
    step,
    wait_for,
)
from .server_process import ServerProcess

LOGGER = "envserve.pool"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the first line of each of the pool logger's records."""
    return [
        record.getMessage().split("\n")[0]
        for record in caplog.records
        if record.name == LOGGER
    ]


def repro_in(line: str) -> Path:
    found = re.search(r"envserve replay (\S+)", line)
    assert found, line
    return Path(shlex.split(found[1])[0])


def test_line_of_an_env_that_raises(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pool = make_pool.and_reset(
        FAULTY, 4, 2, first_env_index=10, crash_dir=str(tmp_path / "a folder")
    )
    frozen = pool._clock()
    pool._clock = lambda: frozen
    step(pool, 0)
    step(pool, [0, 0, 0, 1])
    (line,) = lines(caplog)
    path = next((tmp_path / "a folder").iterdir())
    assert line == (
        f"Env 13 (worker 1, pid {pool.worker_pids[1]}) failed and was rebuilt: "
        f"RuntimeError: the simulator lost its balance; incarnation 0; "
        f"seed {env_seed(SEED, 13, 0)}; step 2 of its episode; last action 1; "
        f"to replay it: envserve replay '{path}'"
    )
    assert "in _raise" in caplog.text
    caplog.clear()
    step(pool, 0)
    step(pool, [0, 0, 0, 1])
    assert not caplog.text  # equals the previous fault
    frozen += 1.0
    step(pool, 0)
    step(pool, [0, 0, 0, 1])
    (line,) = lines(caplog)
    assert "incarnation 2" in line
    assert "envserve replay" in line
    assert line.endswith(" (and 1 more in the last 1.0 s)")
    assert "in _raise" not in caplog.text


def test_line_of_a_worker_that_dies(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pool = make_pool.and_reset(
        FAULTY,
        4,
        2,
        env_kwargs={"fault": "segfault"},
        crash_dir=str(tmp_path),
        import_modules=("tests.oracle.probe_envs",),
    )
    pid = pool.worker_pids[1]
    (_, lost) = step(pool, [0, 0, 0, 1])
    (line,) = lines(caplog)
    (path,) = tmp_path.iterdir()
    head, _, tail = line.partition("; its stderr ends with ")
    assert head == (
        f"worker 1 (envs 2 to 3), pid {pid}, was killed by SIGSEGV; in a step of "
        f"env 3; incarnation 0; seed {env_seed(SEED, 3, 0)}; step 1 of its episode; "
        f"last action 1"
    )
    assert tail.startswith('"Fatal Python error: Segmentation fault: File ')
    assert tail.endswith(f"envserve replay {path} --import tests.oracle.probe_envs")
    text = lost.faults[0].text
    assert text.startswith("worker 1 (envs 2 to 3) was killed by SIGSEGV\nThe end of ")
    assert "in string_at" in text
    assert len(text) < 2500
    assert "Segmentation fault" in load_repro(path).end.stderr_tail


@pytest.fixture(scope="module")
def patient_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher whose template waits longer for a stack, for loaded machines."""
    text = "import envserve.worker.template as it; it._STACK_SECONDS = 20.0"
    with launcher_with(tmp_path_factory.mktemp("patient"), patience=text) as launcher:
        yield launcher


@pytest.mark.parametrize("fault", ["hang", "spin"])
def test_line_of_a_worker_that_hangs_contains_its_location(
    make_pool: PoolMaker,
    patient_launcher: Launcher,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    fault: str,
) -> None:
    pool = make_pool.and_reset(
        FAULTY,
        1,
        1,
        patient_launcher,
        env_kwargs={"fault": fault},
        step_timeout_seconds=1.0,
        crash_dir=str(tmp_path),
    )
    step(pool, 0)  # the first step has more time
    (outcome,) = step(pool, 1)
    (line,) = lines(caplog)
    assert "hung: a step timed out after 1 s" in line
    assert "it was killed by SIGKILL" in line
    assert f" in _{fault}" in line
    assert f" in _{fault}" in outcome.faults[0].text


def test_worker_that_is_killed_while_idle_is_not_blamed_on_an_env(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pool = make_pool.and_reset(LEDGER, 2, 1, crash_dir=str(tmp_path))
    step(pool, 3)
    pid = pool.worker_pids[0]
    kill(pid)
    wait_for(pool, lambda: pool.worker_pids[0] not in (None, pid))
    (line,) = lines(caplog)
    assert line == (
        f"worker 0 (envs 0 to 1), pid {pid}, was killed by SIGKILL; no env was running"
    )
    assert list(tmp_path.iterdir()) == []


def test_line_of_an_env_that_exits_the_interpreter_names_the_exception(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    script = "if seed is None: raise SystemExit(3)"
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"reset": script}, crash_dir=None)
    reset(pool)
    step(pool, 0)
    (line,) = lines(caplog)
    assert "stopped: SystemExit: 3; in a reset of env 0; " in line


def test_line_of_a_worker_that_exits_contains_the_reason(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    script = "if seed is None: os.write(2, b'no licence\\n'); os._exit(3)"
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"reset": script}, crash_dir=None)
    reset(pool)
    step(pool, 0)
    (line,) = lines(caplog)
    assert "exited with code 3; in a reset of env 0" in line
    assert line.endswith('its stderr ends with "no licence"')
    caplog.clear()
    log = FaultLog(pool.config, pool.blocks, "session 7", "")
    worker = pool._workers.all[0]
    slab = pool._workers.slab
    assert slab is not None
    ring = ActionRing(pool.spec, 1, slab.extra)
    log.attach(slab, pool.spec)
    text = "stopped:\nTraceback:\nValueError: no level"
    assert ring.read(0) is not None
    log.log_worker_loss(worker, Lost(Status.WORKER_DIED, text), {}, 0.0)
    log.clear_records(worker)
    (line,) = lines(caplog)
    assert line.startswith("session 7: worker 0 (env 0), pid ")
    assert "stopped: ValueError: no level; no env was running" in line
    # The old envs' records must not be attributed to the new envs.
    assert ring.read(0) is None
    assert not slab.heartbeats[:, :2].any()


def test_each_class_is_warned_about_once_and_sixteen_classes_at_most(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(SCRIPT, 1, 1)
    log = FaultLog(pool.config, pool.blocks, "", "")
    assert log.warn_once(["A is slow"]) == ["A is slow"]
    assert log.warn_once(["A is slow", "B is old"]) == ["B is old"]
    many = [f"C{number} is odd" for number in range(20)]
    assert log.warn_once(many) == many[:14]
    assert log.warn_once(many) == []
    assert lines(caplog) == ["A is slow", "B is old", *many[:14]]


def test_workers_that_are_replaced_after_an_interrupt_are_not_logged(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pool = make_pool(LEDGER, 2, 2, crash_dir=str(tmp_path))
    reset(pool)
    pool.submit_step([0, 1])
    pool.invalidate("a call was interrupted")
    for outcome in step(pool, 3):
        assert "was replaced: a call was interrupted" in outcome.faults[0].text
    assert lines(caplog) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["call", "set", "get"])
def test_file_records_whether_the_env_was_touched(
    make_pool: PoolMaker, tmp_path: Path, kind: Literal["call", "set", "get"]
) -> None:
    script = "if action: os._exit(3)"
    pool = make_pool(SCRIPT, 2, 1, env_kwargs={"step": script}, crash_dir=str(tmp_path))
    reset(pool)
    arguments = ("x",) if kind == "set" else ()
    pool.submit_call([make_call([1], kind, "value", *arguments)])
    gather(pool, [0])
    step(pool, [0, 1])
    (path,) = tmp_path.iterdir()
    assert load_repro(path).played.is_touched is (kind != "get")


def test_crash_in_a_call_is_logged_and_writes_no_file(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pool = make_pool.and_reset(SCRIPT, 2, 1, crash_dir=str(tmp_path))
    pool.submit_call([make_call([1], "call", "run", "os._exit(3)")])
    gather(pool, [0])
    (line,) = lines(caplog)
    assert "in a call of env 1" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_crash_in_a_reset_names_the_env(
    make_pool: PoolMaker,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    autoreset: str,
) -> None:
    script = "if seed is None and self.np_random.random() < 1: os._exit(3)"
    pool = make_pool.and_reset(
        SCRIPT,
        2,
        1,
        env_kwargs={"reset": script},
        autoreset=autoreset,
        crash_dir=str(tmp_path),
    )
    step(pool, 0)
    if autoreset == "disabled":
        reset(pool)
    (line,) = lines(caplog)
    assert "in a reset of env 0" in line
    played = load_repro(repro_in(line)).played
    assert len(played.actions[0]) == (1 if autoreset == "same_step" else 0)


def test_end_of_stderr_is_printable_and_on_one_line(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    script = "os.write(2, b'\\x1b[31mred\\xff\\r\\xed\\xa0\\x80\\n\\n'); os._exit(3)"
    pool = make_pool(SCRIPT, 1, 1, env_kwargs={"step": script}, crash_dir=None)
    reset(pool)
    (outcome,) = step(pool, 0)
    (line,) = lines(caplog)
    assert line.isprintable()
    assert line.endswith('its stderr ends with "\\xed\\xa0\\x80"')
    assert "\x1b" not in outcome.faults[0].text
    assert "\\x1b[31mred\\xff" in outcome.faults[0].text


def test_storm_of_crashes_writes_one_file_and_one_line(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pool = make_pool(FAULTY, 64, 1, crash_dir=str(tmp_path))
    clock = pool._clock
    frozen = clock()
    pool._clock = lambda: frozen
    reset(pool)
    for _ in range(4):
        step(pool, 1)
        step(pool, 0)  # an env that fails twice in a row costs its worker
    (line,) = lines(caplog)
    (path,) = tmp_path.iterdir()
    assert repro_in(line) == path
    pool._clock = clock
    pool.close()
    assert lines(caplog)[-1].startswith("faults like those above: 255 more in the last")


def test_server_writes_files_to_its_crash_dir(tmp_path: Path) -> None:
    folder = tmp_path / "crashes"
    with ServerProcess(tmp_path, "--crash-dir", str(folder)) as server:
        with BatchEnv.connect(FAULTY, [server.address], 2, seed=1) as batch:
            batch.reset()
            batch.step(np.array([0, 1]))
        server.signal(signal.SIGTERM)
        log = server.end()
    (path,) = folder.iterdir()
    (line,) = [line for line in log.splitlines() if "lost its balance;" in line]
    assert " WARNING lease 1 of local: Env 1 (worker 1, pid " in line
    assert repro_in(line) == path
    assert line.endswith(" --import tests.oracle.probe_envs")


def test_folder_that_cannot_be_written_costs_a_line_and_no_step(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    pool = make_pool.and_reset(FAULTY, 2, 1, crash_dir=str(tmp_path / "file"))
    (outcome,) = step(pool, [1, 0])
    assert len(outcome.faults) == 1
    assert "cannot write repro files" in caplog.text
    assert "replay" not in lines(caplog)[0]
    assert not any(outcome.faults for outcome in step(pool, 0))
    assert np.isfinite(pool.rows.reward).all()


def test_options_that_envs_reject_are_logged_in_one_line(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One line is enough for many resets, because the caller receives the error."""
    pool = make_pool.and_reset("envserve/Reset-v0", 8, 1, crash_dir=str(tmp_path))
    frozen = pool._clock()
    pool._clock = lambda: frozen
    rejected = Reset(0, options=codec.encode({"level": 13}))
    for _ in range(3):
        pool.submit_reset([rejected])
        (outcome,) = gather(pool, [0])
        assert isinstance(outcome.error, EnvError)
    (line,) = lines(caplog)
    assert line.startswith("Env 0: reset failed, and the env was reset without seed")
    assert line.endswith("ValueError: there is no level 13; 7 more in its block")
    assert not [*tmp_path.iterdir()]
