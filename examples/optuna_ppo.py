"""Tune the settings of `ppo` for CartPole with Optuna, pruning unpromising trials.

python examples/optuna_ppo.py [--connect sim1 sim2]
"""

import argparse
import time
from pathlib import Path

import optuna  # pip install '.[trainers]'
import tensorflow as tf

from ppo.config.named_configs import CONFIGS
from ppo.environments import env_maker
from ppo.run_folder.folder import RunFolder
from ppo.train import Progress, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=40_960, help="env steps per trial")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    runs = Path(time.strftime("runs/optuna-%Y%m%d-%H%M%S"))
    parser.add_argument("--runs", type=Path, default=runs, help="folder to create")
    args = parser.parse_args()
    tf.get_logger().setLevel("ERROR")  # hides warnings about retracing in each trial

    def evaluate(trial: optuna.Trial) -> float:
        config = CONFIGS["cartpole"].replace(
            total_steps=args.steps,
            evaluate_every=args.steps // 5,
            seed=args.seed,
            epochs=trial.suggest_int("epochs", 1, 20),
            learning_rate=trial.suggest_float("learning_rate", 1e-4, 3e-3, log=True),
            discount=trial.suggest_float("discount", 0.97, 0.995),
        )

        def prune(progress: Progress) -> None:
            score = progress.metrics.get("evaluation_return")
            if score is not None:
                trial.report(score, progress.steps)
                if trial.should_prune():
                    raise optuna.TrialPruned

        run_folder = RunFolder.create(args.runs / f"trial-{trial.number}", config)
        make_env = env_maker(config, args.connect)
        result = train(config, run_folder, make_env, on_progress=prune)
        return result.curve[-1][1]  # mean return of the last evaluation

    sampler = optuna.samplers.TPESampler(seed=args.seed)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(evaluate, n_trials=args.trials)
    num_pruned = sum(trial.state.name == "PRUNED" for trial in study.trials)
    print(f"trials: {len(study.trials)}, of which {num_pruned} were pruned")
    print(f"best settings: {study.best_params}")
    print(f"best return: {study.best_value:.1f}")


if __name__ == "__main__":
    main()
