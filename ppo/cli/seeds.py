"""Several seeds of one config: a run each, and what they come to together.

The folder of a study holds the folder of each run, `seed-0` and so on. Each run is a
process, `ppo train --resume`, and so fails, stops and goes on as any other does.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from envserve.host_resources import num_cores
from envserve.worker.orphans import code_tied_to_parent
from ppo.cli.plot import plot
from ppo.cli.progress import Screen
from ppo.cli.run_setup import Plan
from ppo.cli.stop_signals import StopSignals
from ppo.errors import RunFolderError
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics_file import read_metrics

_RUN = code_tied_to_parent("ppo.cli.app")  # it stops with a checkpoint then


def train_seeds(
    screen: Screen, plan: Plan, num_seeds: int, at_once: int | None, workers: int | None
) -> int:
    """Train what is not finished of a study; print and draw what all have come to.

    Returns 1 if a seed has failed, else 0.

    The plan is that of the first seed. Without a number of seeds they are those that
    its folder has. Each has its share of the cores for workers and threads.
    """
    path, first = plan.run_folder.path, plan.config.seed
    names = [each.name.removeprefix("seed-") for each in path.glob("seed-*")]
    known = sorted(int(name) for name in names if name.isdecimal())
    seeds = range(first, first + num_seeds) if num_seeds else known
    runs = {seed: RunFolder(path / f"seed-{seed}") for seed in seeds}
    plan.run_folder.save_config(plan.config)
    for seed, run in runs.items():
        run.path.mkdir(exist_ok=True)
        run.save_config(plan.config.replace(seed=seed))
        run.save_env_source(plan.place)
    at_once = min(at_once or num_cores(), len(runs))
    share = max(1, num_cores() // at_once)
    for line in plan.header(workers or share):
        screen.print(line)
    screen.print(f"  seeds  {', '.join(map(str, runs))}; {at_once} at a time")
    has_failed = _train(screen, plan, runs, at_once, workers or share)
    means = {run.path: _mean_return(plan, run) for run in runs.values()}
    returns = {run: mean for run, mean in means.items() if mean is not None}
    if returns:
        scores = np.array(list(returns.values()))
        low, high = interval(scores)
        screen.print(
            f"Mean return {scores.mean():.1f} over {len(scores)} of {len(runs)} seeds, "
            f"std {scores.std(ddof=min(1, len(scores) - 1)):.1f}, 95 % interval "
            f"{low:.1f} to {high:.1f}, lowest {scores.min():.1f}"
        )
        metric = "evaluation_return" if plan.config.evaluate_every else "mean_return"
        with contextlib.suppress(SystemExit):  # without matplotlib
            plot(list(returns), out=path / f"{metric}.png", metric=metric)
    if len(returns) < len(runs):
        screen.print(f"Go on with: ppo train --resume {plan.run_folder.quoted_path}")
    return int(has_failed)


def interval(scores: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean of scores, one per seed.

    It is the percentile bootstrap over seeds: with three to five of them it is narrower
    than it should be. The same scores give the same interval.
    """
    draws = np.random.default_rng(0).choice(scores, (10_000, len(scores)))
    low, high = np.percentile(draws.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def _train(
    screen: Screen, plan: Plan, runs: dict[int, RunFolder], at_once: int, workers: int
) -> bool:
    """Train what is not finished; returns whether a seed has failed.

    A first signal has all of them end after their iteration, a second one at once.
    """
    waiting = [seed for seed in runs if _mean_return(plan, runs[seed]) is None]
    running: dict[int, subprocess.Popen[bytes]] = {}
    num_failed = 0
    screen.phase("training", is_passing=True)
    with StopSignals() as stop, contextlib.ExitStack() as at_end:
        at_end.callback(_end, running)
        while running or (waiting and not stop.has_fired()):
            if stop.has_fired():
                _end(running)
            while waiting and len(running) < at_once and not stop.has_fired():
                seed = waiting.pop(0)
                running[seed] = _start(runs[seed], workers)
            for process in [*running.values()][:1]:  # none, if it was just stopped
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1.0)
            for seed in [seed for seed in running if running[seed].poll() is not None]:
                code, mean = running.pop(seed).wait(), _mean_return(plan, runs[seed])
                if mean is not None:
                    screen.print(f"seed {seed}: mean return {mean:.1f}")
                elif not stop.has_fired():
                    num_failed += 1
                    why = _said(runs[seed]) or f"exit code {code}"
                    screen.print(f"seed {seed} failed: {why}", style="red")
            num_done = len(runs) - len(waiting) - len(running) - num_failed
            parts = [f"seed {seed}: {_said(runs[seed])}" for seed in running]
            screen.rename("\n".join([*parts, f"{num_done} of {len(runs)} seeds done"]))
    screen.phase("")
    return num_failed > 0


def _start(run: RunFolder, workers: int) -> subprocess.Popen[bytes]:
    options = [f"--num-workers={workers}", f"--intra-op-threads={min(workers, 2)}"]
    with (run.path / "output.log").open("wb") as log:
        return started([*options, "--resume", str(run.path)], stdout=log, stderr=log)


def started(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a `ppo train` that ends with this process; Ctrl-C is for us to pass on."""
    command = [sys.executable, "-P", "-c", _RUN, "train", *words]
    options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen(command, **options)


def _end(running: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in running.values():
        process.terminate()
    for process in running.values():
        process.wait()


def _said(run: RunFolder) -> str:
    """Return the error that a process ended with, else what it has said last."""
    lines = (run.path / "output.log").read_text(errors="replace").splitlines()
    return ([line for line in lines if line.startswith("Error: ")] or lines or [""])[-1]


def _mean_return(plan: Plan, run: RunFolder) -> float | None:
    """Return what a seed earned at the end of the plan's steps; None before.

    A callback may have ended it sooner: then it was evaluated by that training.
    """
    try:
        evaluation = json.loads((run.path / "evaluation.json").read_text())
        last = read_metrics(run.metrics_path)[-1]
    except (OSError, RunFolderError):
        return None
    steps, total_steps = last["steps"], plan.config.total_steps
    is_over = total_steps == evaluation.get("total_steps")
    is_over |= plan.config.is_over_after(steps)
    is_its = is_over and evaluation["steps"] == steps
    return evaluation["mean_return"] if is_its else None
