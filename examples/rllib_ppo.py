"""Train CartPole with RLlib's PPO, on this host or on servers.

python examples/rllib_ppo.py [--connect tcp://sim1:5555 tcp://sim2:5555]
"""

import argparse
import time

import ray  # pip install '.[trainers]'
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    config = (
        PPOConfig()
        # Original: .environment("CartPole-v1")
        .environment("envserve.gym:CartPole-v1", env_config={"addresses": args.connect})
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=8,
            # Original: gym_env_vectorize_mode="sync",
            gym_env_vectorize_mode="vector_entry_point",
        )
        .training(
            train_batch_size_per_learner=2048,
            minibatch_size=256,
            num_epochs=10,
            lr=3e-4,
            vf_loss_coeff=0.01,
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64]))
        .debugging(seed=args.seed, log_level="ERROR")
    )
    algorithm = config.build_algo()
    started_at = time.perf_counter()
    steps = 0
    while steps < args.steps:
        result = algorithm.train()["env_runners"]
        steps = int(result["num_env_steps_sampled_lifetime"])
        print(f"{steps} steps, mean return {result['episode_return_mean']:.1f}")
    speed = steps / (time.perf_counter() - started_at)
    algorithm.stop()
    ray.shutdown()
    print(f"env steps/s: {speed:.0f}")
    print(f"mean return: {result['episode_return_mean']:.1f}")


if __name__ == "__main__":
    main()
