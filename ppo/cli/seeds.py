"""Train a study: several seeds of one config, with a summary of their returns.

The folder of a study contains a run folder per seed: `seed-0`, `seed-1`, ... Each run
is a process, `ppo train --resume`, so it can fail, stop and resume like any other run.
Changed settings are options of this process, which saves them once it has loaded the
checkpoint with them. The study saves them when a run has done so.
"""

import contextlib
import json
import re
import subprocess
from typing import Any

import numpy as np

from envserve.host_resources import num_cores
from envserve.python_process import main_command
from envserve.regular_file import open_no_link
from envserve.text import exception_line, rounded
from ppo.cli.options import user_command
from ppo.cli.plot import plot
from ppo.cli.progress import Screen
from ppo.cli.run_setup import RunPlan, save_env_source
from ppo.cli.stop_signals import StopSignals
from ppo.config.named_configs import read_config, read_table
from ppo.errors import ConfigError, RunFolderError
from ppo.evaluation.statistics import bootstrap_interval, interquartile_mean
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics_file import read_metrics


def train_seeds(
    screen: Screen,
    plan: RunPlan,
    num_seeds: int,
    at_once: int | None,
    workers: int | None,
    threads: list[str],
) -> int:
    """Train the unfinished seeds of a study; then print and plot all returns.

    Args:
      screen: Shows the progress.
      plan: Plan of the first seed.
      num_seeds: Number of seeds; 0 means the seeds in the folder of the study.
      at_once: Number of seeds to train at a time; by default, one per core.
      workers: Worker processes per seed; by default, the seed's share of the cores.
      threads: Options that set numbers of TensorFlow threads, as the user gave them.

    Returns:
      The exit code: 1 if a seed failed, otherwise 0.
    """
    path, first = plan.run_folder.path, plan.config.seed
    names = [folder.name.removeprefix("seed-") for folder in path.glob("seed-*")]
    existing = sorted(
        int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)
    )
    seeds = range(first, first + num_seeds) if num_seeds else existing
    if not seeds:
        raise RunFolderError(
            f"{path}: expected the run folders of seeds, such as seed-0, found seed-"
            f"{', seed-'.join(sorted(names))}; rename them, or resume one of them."
        )
    runs = {seed: RunFolder(path / f"seed-{seed}") for seed in seeds}
    plan.run_folder.check_folders(*(run.path.name for run in runs.values()))
    for seed, run in runs.items():
        with run.writing():
            run.path.mkdir(exist_ok=True)
        if not run.config_path.exists():
            run.save_env_source(plan.run_folder.env_source())
            run.save_config((plan.earlier_config or plan.config).replace(seed=seed))
    at_once = min(at_once or num_cores(), len(runs))
    workers = workers or max(1, num_cores() // at_once)
    for line in plan.header(workers):
        screen.print(line)
    screen.print(f"  seeds  {', '.join(map(str, runs))}; {at_once} at a time")
    words = [f"--num-workers={workers}", f"--intra-op-threads={min(workers, 2)}"]
    has_failed = _train(screen, plan, runs, at_once, [*words, *threads])
    means = {run.path: _mean_return(plan, run) for run in runs.values()}
    returns = {run: mean for run, mean in means.items() if mean is not None}
    if returns:
        scores = np.array(list(returns.values()))
        low, high = bootstrap_interval(scores)
        screen.print(
            f"Mean return {rounded(scores.mean())} "
            f"over {len(scores)} of {len(runs)} seeds, "
            f"std {rounded(scores.std(ddof=min(1, len(scores) - 1)))}, 95 % interval "
            f"{rounded(low)} to {rounded(high)}, lowest {rounded(scores.min())}"
        )
        if len(scores) >= 4:  # otherwise, the interquartile mean equals the mean
            low, high = bootstrap_interval(scores, statistic=interquartile_mean)
            mean = float(interquartile_mean(scores))
            screen.print(
                f"Interquartile mean {rounded(mean)}, 95 % interval "
                f"{rounded(low)} to {rounded(high)}"
            )
        metric = "evaluation_return" if plan.config.evaluate_every else "mean_return"
        with contextlib.suppress(SystemExit):  # matplotlib may not be installed
            plot(list(returns), out=path / f"{metric}.png", metric=metric)
    if len(returns) < len(runs):
        command = f"{user_command('ppo')} train --resume {plan.run_folder.quoted_path}"
        screen.print(f"Resume with: {command}")
    return int(has_failed)


def _train(
    screen: Screen,
    plan: RunPlan,
    runs: dict[int, RunFolder],
    at_once: int,
    options: list[str],
) -> bool:
    """Train the unfinished seeds, and return whether a seed failed.

    At the first signal, all seeds stop after their current iteration; at the second,
    they stop immediately.
    """
    waiting = [seed for seed in runs if _mean_return(plan, runs[seed]) is None]
    running: dict[int, subprocess.Popen[bytes]] = {}
    num_failed, is_saved, source = 0, not plan.is_resumed, plan.env_source
    screen.phase("training", is_transient=True)
    with StopSignals() as stop, contextlib.ExitStack() as stack:
        stack.callback(_terminate, running)
        while running or (waiting and not stop.has_fired()):
            if stop.has_fired():
                _terminate(running)
            while waiting and len(running) < at_once and not stop.has_fired():
                run = runs[seed := waiting.pop(0)]
                # No option removes modules, and the user was not asked about these.
                if run.env_source().import_modules and not source.import_modules:
                    run.save_env_source(source)
                changes = _changes(plan, seed, run)
                running[seed] = _start(run, [*options, *changes])
            # After a signal, there may be no process to wait for.
            for process in [*running.values()][:1]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1.0)
            for seed in [seed for seed in running if running[seed].poll() is not None]:
                code, mean = running.pop(seed).wait(), _mean_return(plan, runs[seed])
                if mean is not None:
                    screen.print(f"seed {seed}: mean return {rounded(mean)}")
                elif not stop.has_fired():
                    num_failed += 1
                    output = _last_output(runs[seed], has_failed=code > 0)
                    reason = output or f"exit code {code}"
                    if code < 0:  # for example by the kernel, for lack of memory
                        reason = f"killed by signal {-code}; last output: {output}"
                    screen.print(f"seed {seed} failed: {reason}", style="red")
            if not is_saved and any(_has_settings(plan, *run) for run in runs.items()):
                is_saved = True
                save_env_source(plan)
                plan.run_folder.save_config(plan.config)
            num_done = len(runs) - len(waiting) - len(running) - num_failed
            parts = [f"seed {seed}: {_last_output(runs[seed])}" for seed in running]
            screen.rename("\n".join([*parts, f"{num_done} of {len(runs)} seeds done"]))
    screen.phase("")
    return num_failed > 0


def _has_settings(plan: RunPlan, seed: int, run: RunFolder) -> bool:
    """Return whether a seed has saved the settings of a plan."""
    with contextlib.suppress(ConfigError, RunFolderError):  # the folder was removed
        return not _changes(plan, seed, run)
    return False


def _changes(plan: RunPlan, seed: int, run: RunFolder) -> list[str]:
    """Return the options that change the saved settings of a seed to those of a plan.

    Raises:
      ConfigError, RunFolderError: The saved settings cannot be read.
    """
    saved, source = vars(read_config(run.config_path)), plan.env_source
    words = [
        f"--set={key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in vars(plan.config.replace(seed=seed)).items()
        if value != saved[key]
    ]
    if source != run.env_source():
        words += [f"--connect={address}" for address in source.addresses or ("local",)]
        words += [f"--import={module}" for module in source.import_modules]
    return words


def _start(run: RunFolder, options: list[str]) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as stack:
        with run.writing():
            path = run.path / "output.log"
            log = stack.enter_context(open(path, "wb", opener=open_no_link))
        return start_training(
            [*options, "--trust", "--resume", str(run.path)], stdout=log, stderr=log
        )


def start_training(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a `ppo train` process that stops if this process exits.

    The process runs in a new session, so Ctrl-C does not reach it; the caller forwards
    signals.
    """
    command = main_command("ppo.cli.app", "train", *words, ends_with_parent=True)
    options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
    return subprocess.Popen(command, **options)


def _terminate(running: dict[int, subprocess.Popen[bytes]]) -> None:
    for process in running.values():
        process.terminate()
    for process in running.values():
        process.wait()


def _last_output(run: RunFolder, *, has_failed: bool = False) -> str:
    """Return the error that a run's process reported, or its last line of output.

    With `has_failed`, the error may also be the exception of a traceback. The commands
    that a finished run suggests are omitted. Return an empty string if the folder of
    the run was removed.
    """
    text = ""
    with contextlib.suppress(FileNotFoundError):
        text = (run.path / "output.log").read_text(errors="replace")
    lines = text.partition("\nNext:\n")[0].splitlines()
    if errors := [line for line in lines if line.startswith("Error: ")]:
        return errors[-1]
    _, traceback, rest = text.rpartition("Traceback (most recent call last):\n")
    if has_failed and traceback:
        return exception_line(rest)
    return (lines or [""])[-1]


def _mean_return(plan: RunPlan, run: RunFolder) -> float | None:
    """Return the mean return of a finished seed, or None if it is not finished.

    A seed is finished after the planned steps, or when a callback has ended it earlier.
    """
    try:
        evaluation = read_table(run.path / "evaluation.json")
        # `ppo evaluate` keeps the evaluation with which training ended.
        evaluation = evaluation.get("final", evaluation)
        steps, mean = evaluation["steps"], float(evaluation["mean_return"])
        last = read_metrics(run.metrics_path)[-1]["steps"]
        actions = evaluation.get("actions", plan.config.evaluation_actions)
    except (OSError, RunFolderError, ValueError, TypeError, KeyError, OverflowError):
        return None
    is_finished = plan.config.total_steps == evaluation.get("total_steps")
    is_finished |= plan.config.is_finished_after(last)
    is_finished &= actions == plan.config.evaluation_actions
    return mean if is_finished and steps == last else None
