"""Cases that step envs with envserve: in-process, on one server, or on two servers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

from benchmarks.harness import Case
from envserve.bench.cases import BINDS, batch_env, stepping_batch_env
from envserve.bench.interleaved import Measure, make_measure
from envserve.bench.workload import Workload
from envserve.client.make_vec import make_vec

LIMIT = "limit: bare loops"
IN_PROCESS, IPC, TCP = "envserve in-process", "envserve ipc", "envserve tcp"
WITHOUT_KEYS = "envserve tcp, no keys"
MAKE_VEC = "envserve make_vec"
_BINDS_BY_CASE = {
    IN_PROCESS: (),
    IPC: BINDS["ipc"],
    TCP: BINDS["tcp"],
    "envserve tcp, 2 servers": BINDS["tcp"] * 2,
}


def our_cases(load: Workload) -> list[Case]:
    """Return the cases of `BatchEnv`, and a case that steps `make_vec` in-process."""
    return [
        Case(name, stepping_batch_env, {"load": load, "binds": binds})
        for name, binds in _BINDS_BY_CASE.items()
        if len(binds) <= load.num_envs
    ] + [
        Case(WITHOUT_KEYS, stepping_without_keys, {"load": load}),
        Case(MAKE_VEC, stepping_vector_env, {"load": load}),
    ]


@contextlib.contextmanager
def stepping_without_keys(load: Workload) -> Iterator[Measure]:
    """Step envs on a server over tcp without keys, to measure the cost of keys."""
    options = ("--insecure-no-auth",)
    with batch_env(load, BINDS["tcp"], options, insecure=True) as batch:
        yield make_measure(batch.step, load.actions(), load)


@contextlib.contextmanager
def stepping_vector_env(load: Workload) -> Iterator[Measure]:
    """Step the vector env of `make_vec` in-process; each step returns all infos."""
    envs = make_vec(
        load.env_name,
        load.num_envs,
        num_workers=load.num_workers,
        env_kwargs=load.env_kwargs,
        import_modules=load.import_modules,
    )
    with contextlib.closing(envs):
        envs.reset(seed=0)
        yield make_measure(envs.step, load.actions(), load)


@contextlib.contextmanager
def stepping_in_place(load: Workload, binds: Sequence[str] = ()) -> Iterator[Measure]:
    """Step all envs, and write the rows to the same arrays in every step."""
    with batch_env(load, binds) as batch:
        actions = load.actions()
        out = batch.step(actions[0])
        yield make_measure(functools.partial(batch.step, out=out), actions, load)
