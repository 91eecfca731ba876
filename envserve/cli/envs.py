"""`envserve describe`, `bench` and `replay`: an env, its speed, its crash."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envserve.cli.options import Import, Insecure, look_for_modules_here, names_here
from envserve.cli.terminal import console, fail
from envserve.envs.user_envs import is_user_env, name_and_imports
from envserve.errors import EnvserveError
from envserve.host_resources import num_cores

if TYPE_CHECKING:
    import numpy as np

    from envserve.crashes.repro_file import Repro
    from envserve.monitoring.video import VideoWriter

__all__ = ["bench", "describe", "replay"]


def describe(
    env: Annotated[
        str, typer.Argument(help="Env, as of `start`.", autocompletion=names_here)
    ],
    address: Annotated[
        str | None, typer.Argument(help="Address of a server; by default, here.")
    ] = None,
    import_module: Import = None,
    insecure: Insecure = False,
) -> None:
    """Say what an env takes and gives, and how fast one of it steps.

    What its constructor takes, and its limit of steps, no server tells.
    """
    from gymnasium.vector.utils import batch_space
    from rich.table import Table

    from envserve.bench.interleaved import time_each
    from envserve.client import BatchEnv
    from envserve.client.vector_env import metadata_of
    from envserve.envs.registry import import_env_modules
    from envserve.text import one_line

    known: dict[str, object] = {}
    try:
        if address is None:
            look_for_modules_here([env] if is_user_env(env) else [])
            name, modules = name_and_imports(env, import_module or ())
            import_env_modules(modules)
            known = _registered(name)
            batch = BatchEnv.local(name, 1, 1, import_modules=modules)
        else:
            batch = BatchEnv.connect(env, [address], 1, insecure=insecure)
        with batch:
            modes = metadata_of(batch).get("render_modes", ())
            batch.reset()
            actions = itertools.repeat(batch_space(batch.action_space, 1).sample())
            seconds = time_each(batch.step, actions, 0.5)
    except EnvserveError as error:
        fail(error, 1)
    table = Table.grid(padding=(0, 2))
    for what, told in {
        "observation": batch.observation_space,
        "action": batch.action_space,
        "render modes": ", ".join(map(str, modes)),
        "steps/s": f"{len(seconds) / seconds.sum():,.0f} of one env in a worker",
        **known,
    }.items():
        table.add_row(what, one_line(" ".join(str(told or "-").split()), 1000))
    console().print(table, markup=False)


def _registered(name: str) -> dict[str, object]:
    from envserve.envs.registry import maker_of, spec_of

    spec = spec_of(name)
    takes = inspect.signature(maker_of(spec)).parameters.values()
    given = [(part, spec.kwargs.get(part.name, part.default)) for part in takes]
    shown = (str(p.replace(annotation=p.empty, default=value)) for p, value in given)
    return {"time limit": spec.max_episode_steps, "arguments": ", ".join(shown)}


def bench(
    env: Annotated[
        str,
        typer.Option(help="Env to measure, as of `start`.", autocompletion=names_here),
    ] = "CartPole-v1",
    import_module: Import = None,
    num_envs: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 16,
    num_workers: Annotated[
        int, typer.Option(min=1, help="Processes that step envs.")
    ] = num_cores(),
    seconds: Annotated[
        float, typer.Option(min=0.001, help="Length of one measurement.")
    ] = 0.6,
    rounds: Annotated[
        int, typer.Option(min=1, help="Measurements of each case, in turns.")
    ] = 5,
) -> None:
    """Measure an env here, behind a server, and in Gymnasium's vector envs."""
    from envserve.bench.command import bench as measure
    from envserve.bench.workload import Workload

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends what it started
    workers = min(num_workers, num_envs)
    look_for_modules_here([env] if is_user_env(env) else [])
    try:
        name, modules = name_and_imports(env, import_module or ())
        load = Workload(name, num_envs, workers, seconds, import_modules=modules)
        measure(load, rounds)
    except EnvserveError as error:
        fail(error, 1)


def replay(
    file: Annotated[Path, typer.Argument(help="Repro file; the log names it.")],
    import_module: Import = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a step hangs; by default, as it was."),
    ] = None,
    pdb: Annotated[
        bool,
        typer.Option("--pdb", help="Play it here, and open the debugger where it is."),
    ] = False,
    film: Annotated[
        Path | None, typer.Option(help="MP4 or GIF file to make of its last steps.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="How many steps to film.")] = 200,
) -> None:
    """Play a crashed env again; exits with 0 if it ends alike, with 1 if not."""
    from envserve.envs.registry import import_env_modules
    from envserve.monitoring.video import VideoWriter
    from envserve.pool import replay as replays
    from envserve.pool.launcher import Launcher
    from envserve.worker.rendering import headless_settings

    if pdb and film:
        fail("expected --pdb or --film; got both", 2)
    modules = import_module or ()
    try:
        repro = replays.load_repro(file)
        print(replays.describe_repro(repro), flush=True)
        if pdb:
            import_env_modules(modules)
            if not _debug(repro):
                fail("it did not crash; the debugger has nothing to show", 1)
            raise typer.Exit(0)
        with contextlib.ExitStack() as stack:
            writer = on_frame = None
            if film:
                writer = stack.enter_context(VideoWriter(film))
                on_frame = partial(_add_frame, writer)
                os.environ.update(headless_settings(os.environ))  # for the worker
            launcher = stack.enter_context(contextlib.closing(Launcher(modules)))
            ending = replays.replay(repro, launcher, timeout, on_frame, last)
        if writer is not None:
            print(f"{film}: {writer.num_frames} frames")
    except (EnvserveError, OSError) as error:
        fail(error, 2)
    print("reproduced" if ending.is_reproduced else "not reproduced:", ending.text)
    raise typer.Exit(0 if ending.is_reproduced else 1)


def _add_frame(
    writer: VideoWriter, frames_per_second: float, frame: np.ndarray[Any, Any]
) -> None:
    writer.frames_per_second = frames_per_second
    writer.add(frame)


def _debug(repro: Repro) -> bool:
    """Plays a crash in this very process; tells whether the debugger was opened.

    What the env has raised is looked at where it was. What cannot be, since the process
    ends or hangs, or the env's step has returned, is stepped through before it is.
    """
    import bdb
    import traceback
    from pdb import Pdb

    from envserve.slab import Status
    from envserve.worker.replay_worker import build, play

    env, spec = build(repro)
    last = len(repro.played.actions[0])
    is_raised = repro.end.status is Status.ENV_ERROR and not repro.end.is_violation
    debugger = Pdb()

    def step(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (result := debugger.runcall(own, *args, **kwargs)) is None:
            raise bdb.BdbQuit
        return result

    def on_action(number: int) -> None:
        if number == last and not is_raised:
            print("What comes next ended it: n goes on by a line, s into a call.")
            env.step_by(step)

    try:
        play(repro, env, spec, on_action)
    except bdb.BdbQuit:
        return True
    except Exception as error:
        traceback.print_exception(error)
        if is_raised:
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
        return True
    finally:
        env.close()
    return not is_raised
