"""Train CartPole with Tianshou's PPO, on this host or on servers.

python examples/tianshou_ppo.py [--connect tcp://sim1:5555 tcp://sim2:5555]
"""

import argparse
import time

# This import comes first, because its error names the packages to install.
# Original: from tianshou.env import DummyVectorEnv
from envserve.tianshou import make_vector_env

# isort: split
import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

NUM_ENVS = 8
STEPS_PER_COLLECTION = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    # Original: envs = DummyVectorEnv([lambda: gym.make("CartPole-v1")] * NUM_ENVS)
    envs = make_vector_env("CartPole-v1", NUM_ENVS, args.connect)
    envs.seed(args.seed)
    space, actions = envs.observation_space[0], envs.action_space[0]
    assert isinstance(actions, gym.spaces.Discrete)
    net = Net(state_shape=space.shape, hidden_sizes=[64, 64])
    actor = DiscreteActor(
        preprocess_net=net, action_shape=actions.n, softmax_output=False
    )
    algorithm = PPO(
        policy=DiscreteActorPolicy(actor=actor, action_space=actions),
        critic=DiscreteCritic(preprocess_net=net),
        optim=AdamOptimizerFactory(lr=1e-3),
        ent_coef=0.001,
        max_grad_norm=0.5,
    )
    buffer = VectorReplayBuffer(STEPS_PER_COLLECTION, NUM_ENVS)
    collector = Collector(algorithm, envs, buffer)
    parameters = OnPolicyTrainerParams(
        training_collector=collector,
        max_epochs=1,
        epoch_num_steps=args.steps,
        collection_step_num_env_steps=STEPS_PER_COLLECTION,
        update_step_num_repetitions=10,
        batch_size=128,
        verbose=False,
        show_progress=False,
    )
    started_at = time.perf_counter()
    algorithm.run_training(parameters)
    speed = collector.collect_step / (time.perf_counter() - started_at)
    print(f"env steps/s: {speed:.0f}", flush=True)
    statistics = collector.collect(n_episode=24, reset_before_collect=True)
    envs.close()
    print(f"mean return: {statistics.returns.mean():.1f}")


if __name__ == "__main__":
    main()
