"""`stalls`: rollouts on many servers, on which some steps take much longer."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from benchmarks.command import Repetitions, Run, Seconds, sub_command
from benchmarks.harness import Case
from benchmarks.learning.rollouts import RolloutLoad, rollouts
from benchmarks.result import median, ratio, spread
from benchmarks.scaling.simulated_servers import (
    NAME,
    NO_STALLS,
    Stalls,
    simulated_servers,
)
from envserve.bench.interleaved import MICROSECONDS, SPEED, Measure
from envserve.bench.workload import Workload
from envserve.client import BatchEnv

_STALLS, _NO_STALLS = "stalls", "no stalls"


def case_name(stalls: str, act_on: float) -> str:
    """Return the name of a case; `stalls` is "stalls" or "no stalls"."""
    return f"{stalls}, act_on {act_on:g}"


@sub_command
def stalls(
    run: Run,
    servers: Annotated[int, typer.Option(min=1, help="Number of servers.")] = 64,
    envs_per_server: Annotated[
        int, typer.Option(min=1, help="Number of envs on each server.")
    ] = 16,
    milliseconds: Annotated[
        float, typer.Option(min=0.0, help="Duration of a step.")
    ] = 1.0,
    stall_milliseconds: Annotated[
        float, typer.Option(min=0.0, help="Duration of a step that stalls.")
    ] = 50.0,
    stall_percent: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Steps that stall, in percent.")
    ] = 1.0,
    horizon: Annotated[int, typer.Option(min=1, help="Batch steps per rollout.")] = 128,
    seconds: Seconds = 3.0,
    repetitions: Repetitions = 3,
) -> None:
    """Compare act_on 0.25 with 1, on simulated servers whose steps can stall."""
    load = Workload(f"{NAME}16", servers * envs_per_server, 1, seconds)
    stalling = Stalls(stall_percent / 100, stall_milliseconds / 1000)
    cases = [
        Case(
            case_name(name, act_on),
            _collecting,
            {
                "work": RolloutLoad(load, horizon),
                "servers": servers,
                "env_seconds": milliseconds / 1000,
                "stalls": stalls_of_case,
                "act_on": act_on,
            },
        )
        for name, stalls_of_case in ((_NO_STALLS, NO_STALLS), (_STALLS, stalling))
        for act_on in (1.0, 0.25)
    ]
    run.publish(
        title=f"{servers} servers with {envs_per_server} envs each, a step takes "
        f"{milliseconds:g} ms, {stall_percent:g} % of steps {stall_milliseconds:g} ms: "
        "env steps per second",
        measured=run.measure(cases, repetitions),
        columns={
            "steps/s": median(SPEED),
            "lowest - highest": spread(SPEED),
            "/ act_on 1": ratio(
                lambda case: case_name(case.partition(",")[0], 1.0), SPEED
            ),
        },
        notes=[
            "The servers are simulated: they have no envs and share one core; the "
            "trainer uses the other core. All envs of a server stall together."
        ],
    )


@contextlib.contextmanager
def _collecting(
    work: RolloutLoad, servers: int, env_seconds: float, stalls: Stalls, act_on: float
) -> Iterator[Measure]:
    with (
        simulated_servers(servers, env_seconds, stalls=stalls) as addresses,
        BatchEnv.connect(
            work.load.env_name, addresses, work.load.num_envs, insecure=True
        ) as batch,
    ):
        simulation, seeds = rollouts(batch, work, act_on=act_on), itertools.count()
        measure = work.repeating(lambda: simulation.run((0, next(seeds))))

        def steps_per_second() -> Mapping[str, float]:
            return {SPEED: 1e6 * work.load.num_envs / measure()[MICROSECONDS]}

        yield steps_per_second
