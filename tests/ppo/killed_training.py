"""Kill a training run at random moments, resume it each time, and print a report.

    python -m tests.ppo.killed_training FOLDER SEED KILLS

Every training process is forked from this one, which has loaded TensorFlow but not used
it. SIGKILL kills it at the n-th access to its run folder, or at the n-th batch step.
The report is a JSON object; the final parameters of the uninterrupted run and of the
killed run are in `straight.npy` and `killed.npy`.
"""

import functools
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from ppo.errors import RunFolderError
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.metrics_file import last_iteration
from ppo.train import train
from tests.ppo.fakes import CountingBatchEnv
from tests.ppo.runs import SMALL, Maker, parameters

CONFIG = SMALL.replace(
    horizon=4,
    minibatch_size=8,
    total_steps=96,  # 12 iterations
    checkpoint_every=16,
    checkpoint_seconds=1e9,
    checkpoints_to_keep=2,
    evaluate_every=24,
    curve_episodes=2,
)
_ACCESSES = ("open", "os.")  # audit events: open, os.rename, os.remove, os.truncate ...


class KillSwitch:
    """Kills the process at the n-th access to a folder, or at the n-th batch step."""

    def __init__(self, folder: Path, kind: str, number: int) -> None:
        self._folder = os.fsencode(folder)
        self._kind = kind
        self._number = number

    def install(self) -> None:
        sys.addaudithook(self._audit)

    def step(self) -> None:
        self._count("step")

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(_ACCESSES) and arguments:
            path = arguments[0]
            if isinstance(path, str | os.PathLike):
                path = os.fsencode(path)
            if isinstance(path, bytes) and path.startswith(self._folder):
                self._count("access")

    def _count(self, kind: str) -> None:
        if kind == self._kind:
            self._number -= 1
            if self._number == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, result: Path, kill_switch: KillSwitch) -> None:
    """Start or resume a training run, and save the final parameters."""
    tf.config.run_functions_eagerly(True)  # tracing takes longer than these few steps
    kill_switch.install()
    try:
        run_folder, config = RunFolder.open(folder)
        is_resumed = True
    except RunFolderError:
        run_folder, config = RunFolder.create(folder, CONFIG), CONFIG
        is_resumed = False
    # Episodes end with each rollout, so resuming does not interrupt any episode.
    maker = Maker(lambda num_envs: CountingBatchEnv([4] * num_envs))
    trained = train(
        config, run_folder, maker, resume=is_resumed, on_step=kill_switch.step
    )
    assert trained.is_finished
    np.save(result, parameters(trained.agent))


def in_process(function: Callable[[], None]) -> int:
    """Run a function in a forked process, and return its exit code or -signal."""
    process = os.fork()
    if process == 0:
        try:
            function()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def newest(folder: Path) -> int:
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def main(folder: Path, seed: int, kills: int) -> None:
    generator = random.Random(seed)
    straight, killed = folder / "straight", folder / "killed"
    never = KillSwitch(straight, "never", 1)
    straight_code = in_process(lambda: run(straight, folder / "straight.npy", never))
    ends = []
    for number in range(kills):
        # On average, a process completes about two of the twelve iterations.
        kind, most = generator.choice([("step", 12), ("access", 60)])
        kill_switch = KillSwitch(killed, kind, generator.randint(1, most))
        code = in_process(
            functools.partial(run, killed, folder / "killed.npy", kill_switch)
        )
        reported = last_iteration(killed / "metrics.jsonl")
        ends.append([kind, code, reported, newest(killed)])
        if code == 0:
            ends[-1][0] = f"finished as number {number}"
    last_code = in_process(
        lambda: run(killed, folder / "killed.npy", KillSwitch(killed, "never", 1))
    )
    codes = [straight_code, last_code]
    print(json.dumps({"codes": codes, "ends": ends}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
