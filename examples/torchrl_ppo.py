"""Train CartPole with PPO, built from TorchRL components, on this host or servers.

python examples/torchrl_ppo.py [--connect tcp://sim1:5555 tcp://sim2:5555]
"""

import argparse
import time
from collections import deque

import gymnasium as gym
import torch  # pip install '.[trainers]'
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, RewardSum
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

# Not in the original.
import envserve

STEPS_PER_BATCH = 1024
EPOCHS = 10
LEARNING_RATE = 1e-3


def perceptron(outputs: int) -> nn.Sequential:
    layers = (nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(64, outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    mode = gym.vector.AutoresetMode.SAME_STEP
    # Original: envs = gym.make_vec("CartPole-v1", 8, "sync", {"autoreset_mode": mode})
    envs = envserve.make_vec("CartPole-v1", 8, args.connect, autoreset_mode=mode)
    env = GymWrapper(envs, categorical_action_encoding=True)
    env = env.append_transform(RewardSum())
    env.set_seed(args.seed)
    actor = ProbabilisticActor(
        TensorDictModule(perceptron(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(perceptron(1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(
        actor, critic, entropy_coeff=0.001, normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), LEARNING_RATE)
    collector = Collector(
        env,
        actor,
        frames_per_batch=STEPS_PER_BATCH,
        total_frames=-(-args.steps // STEPS_PER_BATCH) * STEPS_PER_BATCH,
        auto_register_policy_transforms=True,
    )
    returns: deque[float] = deque(maxlen=100)
    steps = 0
    started_at = time.perf_counter()
    for data in collector:
        steps += data.numel()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * max(0, 1 - steps / args.steps)
        done = data["next", "done"]
        returns.extend(data["next", "episode_reward"][done].tolist())
        with torch.no_grad():
            advantage(data)
        batch = data.reshape(-1)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(batch)).split(128):
                losses = loss_module(batch[rows])
                loss = sum(value for key, value in losses.items() if "loss_" in key)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
    speed = steps / (time.perf_counter() - started_at)
    collector.shutdown()
    print(f"env steps/s: {speed:.0f}")
    print(f"mean return: {torch.tensor(list(returns)).mean():.1f}")


if __name__ == "__main__":
    main()
