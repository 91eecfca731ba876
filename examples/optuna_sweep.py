"""Tune the settings of Stable-Baselines3's PPO for CartPole with Optuna.

python examples/optuna_sweep.py [--connect tcp://sim1:5555 tcp://sim2:5555]
"""

import argparse
import time

import optuna  # pip install '.[trainers]'
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

# Original: from stable_baselines3.common.env_util import make_vec_env
from envserve.sb3 import make_vec_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=40_000, help="env steps per trial")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    # Original: envs = make_vec_env("CartPole-v1", n_envs=8, seed=args.seed)
    envs = make_vec_env("CartPole-v1", 8, args.connect, seed=args.seed)

    def mean_return_of(trial: optuna.Trial) -> float:
        model = PPO(
            "MlpPolicy",
            envs,
            n_steps=trial.suggest_categorical("n_steps", [32, 64, 128]),
            batch_size=256,
            n_epochs=trial.suggest_int("n_epochs", 5, 20),
            learning_rate=trial.suggest_float("learning_rate", 3e-4, 3e-3, log=True),
            gamma=trial.suggest_float("gamma", 0.97, 0.995),
            gae_lambda=0.9,
            seed=args.seed,
            device="cpu",
        )
        model.learn(args.steps)
        return float(evaluate_policy(model, envs, n_eval_episodes=24)[0])

    sampler = optuna.samplers.TPESampler(seed=args.seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    started_at = time.perf_counter()
    study.optimize(mean_return_of, n_trials=args.trials)
    speed = args.trials * args.steps / (time.perf_counter() - started_at)
    envs.close()
    print(f"best settings: {study.best_params}")
    print(f"env steps/s: {speed:.0f}")
    print(f"mean return: {study.best_value:.1f}")


if __name__ == "__main__":
    main()
