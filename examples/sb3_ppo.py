"""Train CartPole with Stable-Baselines3's PPO, on this host or on servers.

python examples/sb3_ppo.py [--connect tcp://sim1:5555 tcp://sim2:5555]
"""

import argparse
import time

# This import comes first, because its error names the packages to install.
# Original: from stable_baselines3.common.env_util import make_vec_env
from envserve.sb3 import make_vec_env

# isort: split
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    # Original: envs = make_vec_env("CartPole-v1", n_envs=8, seed=args.seed)
    envs = make_vec_env("CartPole-v1", 8, args.connect, seed=args.seed)
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gae_lambda=0.8,
        gamma=0.98,
        learning_rate=lambda remaining: 0.001 * remaining,
        clip_range=lambda remaining: 0.2 * remaining,
        seed=args.seed,
        device="cpu",
    )
    started_at = time.perf_counter()
    model.learn(args.steps)
    speed = model.num_timesteps / (time.perf_counter() - started_at)
    print(f"env steps/s: {speed:.0f}", flush=True)
    mean_return, _ = evaluate_policy(model, envs, n_eval_episodes=24)
    envs.close()
    print(f"mean return: {mean_return:.1f}")


if __name__ == "__main__":
    main()
