"""One run of a task, and the file with its score."""

import json
import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scores.tasks import Task
from ppo.config.named_configs import read_config
from ppo.run_folder.folder import RunFolder

_RESULT = "result.json"
_LIBRARIES = ("gymnasium", "mujoco", "numpy", "tensorflow")


class Score(NamedTuple):
    """The result of one run.

    Attributes:
      env_name: Registered name of the env, with its version.
      final: Mean return of the episodes of the final evaluation.
      final_std: Standard deviation of the returns in the final evaluation.
      best: Best mean return of the evaluations during training.
      curve: Env steps and mean return of each evaluation during training.
      train_return: Mean return of the last 100 training episodes, with sampled actions.
      seconds: Duration of training, without evaluations.
      versions: Versions of the libraries that influence the numbers.
      settings: `Task.settings` at the time of the run; None if they were not recorded.
      max_kl: Largest KL divergence of an iteration, in nats; None if not recorded.
    """

    task: str
    seed: int
    env_name: str
    final: float
    final_std: float
    best: float
    curve: Sequence[Sequence[float]]
    train_return: float
    steps: int
    seconds: float
    versions: dict[str, str]
    settings: dict[str, Any] | None = None
    max_kl: float | None = None


def read_score(folder: Path) -> Score | None:
    """Return the score of a run, or None if it has not finished."""
    path = folder / _RESULT
    if not path.exists():
        return None
    return Score(**json.loads(path.read_text(encoding="utf-8")))


def run_one(task: Task, seed: int, folder: Path) -> Score:
    """Train, evaluate and save the score; an interrupted run is resumed.

    TensorFlow uses one thread, because several runs share the cores.
    """
    from ppo.cli.options import start_tensorflow

    config = task.make_config(seed)
    start_tensorflow(1, 1, config)
    from ppo.environments import env_maker
    from ppo.evaluation.evaluate import evaluate_run
    from ppo.run_folder.metrics_file import read_metrics
    from ppo.train import train

    run_folder = RunFolder(folder)
    is_resumed = (
        run_folder.has_checkpoint() and read_config(run_folder.config_path) == config
    )
    if not is_resumed:
        shutil.rmtree(folder, ignore_errors=True)
        run_folder = RunFolder.create(folder, config)
    make_env = env_maker(config, num_workers=1)
    result = train(config, run_folder, make_env, resume=is_resumed)
    evaluation = evaluate_run(config, run_folder, make_env, result.agent)
    rows = read_metrics(folder / "metrics.jsonl")
    score = Score(
        task=task.name,
        seed=seed,
        env_name=config.env_name,
        final=evaluation.mean_return,
        final_std=float(evaluation.returns.std()),
        best=max(mean for _, mean in result.curve),
        curve=result.curve,
        train_return=float(rows[-1]["mean_return"]),
        steps=result.steps,
        seconds=_training_seconds(rows),
        versions={name: import_module(name).__version__ for name in _LIBRARIES},
        settings=task.settings,
        max_kl=max((row["kl"] for row in rows if "kl" in row), default=None),
    )
    text = json.dumps(score._asdict())
    (folder / _RESULT).write_text(text + "\n", encoding="utf-8")
    return score


def _training_seconds(rows: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of all iterations, without evaluations."""
    seconds, previous_steps = 0.0, 0
    for row in rows:
        seconds += (row["steps"] - previous_steps) / row["steps_per_second"]
        previous_steps = row["steps"]
    return seconds
