"""Faults that repeat are logged once and then counted; different faults are shown."""

from __future__ import annotations

import re
import time

import pytest

from envserve.errors import EnvStartError

from .pool_driver import SCRIPT, PoolMaker, reset, step

NUMBERS = "f'{os.getpid()} {id(self):#x} {self.np_random.random()} {time.time_ns()}'"


class Clock:
    """A clock that stands still until the test sets its time forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of the pool's logger."""
    return [r.getMessage() for r in caplog.records if r.name == "envserve.pool"]


def num_faults(messages: list[str]) -> int:
    """Return the number of faults that messages report, one by one or as a count."""
    counts = re.findall(r"([\d,]+) more in the last", "\n".join(messages))
    own = sum(" faults like those above" not in f" {text}" for text in messages)
    return own + sum(int(count.replace(",", "")) for count in counts)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_faults_that_differ_in_numbers_are_logged_once_a_second(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    clock = Clock()
    pool = make_pool.and_reset(
        SCRIPT,
        16,
        num_workers,
        clock=clock,
        crash_dir=None,
        env_kwargs={"step": f"if action: raise RuntimeError({NUMBERS})"},
    )
    for _ in range(4):
        for _ in range(5):
            step(pool, 1)
            step(pool, 0)  # an env that fails twice in a row costs its worker
        clock.now += 1.0
    messages = texts(caplog)
    assert len(messages) == 4
    assert "Traceback" in messages[0]
    assert all("\n" not in message for message in messages[1:])
    assert messages[1].endswith(" (and 79 more in the last 1.0 s)")
    pool.close()
    messages = texts(caplog)
    assert messages[-1] == "faults like those above: 79 more in the last 1.0 s"
    assert num_faults(messages) == 4 * 5 * 16


def test_counted_faults_are_logged_soon_after_the_last_one(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    pool = make_pool.and_reset(
        *(SCRIPT, 8, 1),
        clock=clock,
        crash_dir=None,
        env_kwargs={"step": "if action: raise RuntimeError('no path')"},
    )
    step(pool, 1)
    assert len(texts(caplog)) == 1
    clock.now += 3.0
    step(pool, 0)
    step(pool, 0)
    assert texts(caplog)[1:] == ["faults like those above: 7 more in the last 3.0 s"]


def test_different_faults_are_all_logged_with_their_tracebacks(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    script = "\n".join(
        [
            "if action and self.last_seed % 2: raise ValueError('no path')",
            "if action and self.last_seed % 4: raise ValueError('no path')",
            "if action: raise KeyError('wheel')",
        ]
    )
    pool = make_pool.and_reset(
        SCRIPT, 8, 1, clock=Clock(), crash_dir=None, env_kwargs={"step": script}
    )
    reset(pool)
    for _ in range(3):
        step(pool, 1)
        step(pool, 0)  # an env that fails twice in a row costs its worker
    messages = texts(caplog)
    assert len(messages) == 3
    assert all("Traceback" in message for message in messages)
    assert sum("KeyError" in message for message in messages) == 1
    for number in (1, 2):  # the same text, but at another line
        assert sum(f'"<string>", line {number}' in text for text in messages) == 1


def test_a_flood_of_different_faults_is_bounded(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    words = "''.join(self.np_random.choice(list('abcdef'), 20))"
    clock = Clock()
    pool = make_pool.and_reset(
        SCRIPT,
        16,
        1,
        clock=clock,
        crash_dir=None,
        env_kwargs={"step": f"if action: raise RuntimeError({words})"},
    )
    for _ in range(20):
        step(pool, 1)
        step(pool, 0)  # an env that fails twice in a row costs its worker
        clock.now += 0.5
    assert len(texts(caplog)) <= 20
    clock.now += 60.0
    caplog.clear()
    step(pool, 1)
    # After the count of the earlier faults, the new one is shown in full again.
    assert "Traceback" in texts(caplog)[1]
    pool.close()
    assert num_faults(texts(caplog)[-1:]) > 0


def test_equal_ends_of_workers_are_counted(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    began_at = time.monotonic()
    script = "print('goodbye from', os.getpid(), file=sys.stderr); os._exit(3)"
    pool = make_pool.and_reset(
        SCRIPT, 4, 4, crash_dir=None, env_kwargs={"step": f"if action: {script}"}
    )
    for _ in range(3):
        step(pool, 1)
        step(pool, 0)
    pool.close()
    messages = texts(caplog)
    assert "exited with code 3; in a step of env" in messages[0]
    # Two lines in a second, and one for the faults that closing leaves uncounted.
    assert len(messages) <= 3 + time.monotonic() - began_at
    assert num_faults(messages) == 3 * 4


def test_equal_failures_to_start_are_counted(
    make_pool: PoolMaker, caplog: pytest.LogCaptureFixture
) -> None:
    began_at = time.monotonic()
    script = "print('no license for', os.getpid(), file=sys.stderr); os._exit(3)"
    pool = make_pool(SCRIPT, 4, 4, max_restarts=2, env_kwargs={"init": script})
    assert isinstance(pool.error, EnvStartError)
    pool.close()
    messages = texts(caplog)
    assert re.match(
        r"worker \d \(env \d\), pid \d+, exited with code 3 while it built its envs; "
        r'.*; its stderr ends with "no license for \d+"\nno license for',
        messages[0],
    )
    assert len(messages) <= 2 + time.monotonic() - began_at
    assert 4 < num_faults(messages) <= 4 * 2


def test_resets_that_succeed_at_the_second_attempt_are_counted(
    make_pool: PoolMaker,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = "assert self.value is None, 'can be reset once'; self.value = 1"
    clock = Clock()
    pool = make_pool.and_reset(
        SCRIPT, 4, 2, clock=clock, crash_dir=None, env_kwargs={"reset": script}
    )
    for _ in range(3):
        assert not any(outcome.error for outcome in reset(pool))
    clock.now += 1.5
    reset(pool)
    first, second = texts(caplog)
    assert re.match(
        r"Env \d \(worker \d, pid \d+\) failed in a reset and was rebuilt: "
        r"AssertionError: can be reset once\nTraceback ",
        first,
    )
    assert second.endswith(" (and 11 more in the last 1.5 s)")
    pool.close()
    assert num_faults(texts(caplog)) == 4 * 4
    assert "can be reset once" not in capfd.readouterr().err
