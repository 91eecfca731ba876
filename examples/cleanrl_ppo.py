"""Train CartPole with PPO in a single file, in the style of CleanRL.

The envs use Gymnasium's vector wrappers, and run on this host or on servers.

python examples/cleanrl_ppo.py [--connect tcp://sim1:5555 tcp://sim2:5555]
"""

import argparse
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch  # pip install '.[trainers]'
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
from torch import nn
from torch.distributions import Categorical

# Not in the original.
import envserve

NUM_ENVS = 8
NUM_STEPS = 64
NUM_MINIBATCHES = 4
EPOCHS = 8
GAMMA = 0.98
GAE_LAMBDA = 0.9
CLIP = 0.2
LEARNING_RATE = 1e-3


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self, size: int, num_actions: int) -> None:
        super().__init__()
        hidden = [[layer(size, 64), nn.Tanh(), layer(64, 64), nn.Tanh()] for _ in "ac"]
        self.actor = nn.Sequential(*hidden[0], layer(64, num_actions, 0.01))
        self.critic = nn.Sequential(*hidden[1], layer(64, 1, 1.0))

    def forward(self, obs: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        return Categorical(logits=self.actor(obs)), self.critic(obs).squeeze(-1)


def returns_of(infos: dict[str, Any]) -> list[float]:
    """Return the total reward of each episode that ended in the last step."""
    rows = np.flatnonzero(infos.get("_episode", ()))
    return [float(infos["episode"]["r"][row]) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    envs: gym.vector.VectorEnv[Any, Any, Any]
    # Original: envs = gym.make_vec("CartPole-v1", NUM_ENVS, "sync")
    envs = envserve.make_vec("CartPole-v1", NUM_ENVS, args.connect)
    envs = NormalizeObservation(RecordEpisodeStatistics(envs))
    size = gym.spaces.flatdim(envs.single_observation_space)
    agent = Agent(size, gym.spaces.flatdim(envs.single_action_space))
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE, eps=1e-5)

    shape = (NUM_STEPS, NUM_ENVS)
    obs = torch.zeros((*shape, size))
    actions, log_probs, rewards, ends, dones = torch.zeros((5, *shape)).unbind()
    values = torch.zeros((NUM_STEPS + 1, NUM_ENVS))
    num_updates = max(1, args.steps // (NUM_STEPS * NUM_ENVS))
    next_obs = torch.tensor(envs.reset(seed=args.seed)[0], dtype=torch.float32)
    has_ended = torch.zeros(NUM_ENVS)
    started_at = time.perf_counter()
    for update in range(num_updates):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - update / num_updates)
        is_real = torch.zeros(shape, dtype=torch.bool)
        for t in range(NUM_STEPS):
            # The step after the end of an episode only resets the env: ignore it.
            is_real[t] = has_ended == 0
            obs[t] = next_obs
            with torch.no_grad():
                policy, values[t] = agent(next_obs)
            action = policy.sample()
            actions[t], log_probs[t] = action, policy.log_prob(action)
            step = envs.step(action.numpy())
            next_obs = torch.tensor(step[0], dtype=torch.float32)
            rewards[t], ends[t] = torch.tensor(step[1]), torch.tensor(step[2])
            dones[t] = has_ended = torch.tensor(step[2] | step[3], dtype=torch.float32)
            for episodic_return in returns_of(step[4]):
                global_step = (update * NUM_STEPS + t) * NUM_ENVS
                print(f"{global_step=}, episodic_return={episodic_return}")

        with torch.no_grad():
            values[-1] = agent(next_obs)[1]
        advantages, last = torch.zeros(shape), torch.zeros(NUM_ENVS)
        for t in reversed(range(NUM_STEPS)):
            delta = rewards[t] + GAMMA * values[t + 1] * (1 - ends[t]) - values[t]
            last = delta + GAMMA * GAE_LAMBDA * last * (1 - dones[t])
            advantages[t] = last
        data = (obs, actions, log_probs, advantages, advantages + values[:-1])
        b_obs, b_actions, b_log_probs, b_advantages, b_returns = (
            part[is_real] for part in data
        )
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(b_obs)).chunk(NUM_MINIBATCHES):
                policy, value = agent(b_obs[rows])
                ratio = (policy.log_prob(b_actions[rows]) - b_log_probs[rows]).exp()
                gain = b_advantages[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = -torch.min(gain * ratio, gain * clipped).mean()
                loss += 0.25 * (value - b_returns[rows]).square().mean()
                loss -= 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    speed = num_updates * NUM_STEPS * NUM_ENVS / (time.perf_counter() - started_at)
    print(f"env steps/s: {speed:.0f}", flush=True)

    returns: list[float] = []
    while len(returns) < 24:
        with torch.no_grad():
            action = agent(next_obs)[0].probs.argmax(-1)
        step = envs.step(action.numpy())
        next_obs = torch.tensor(step[0], dtype=torch.float32)
        returns += returns_of(step[4])
    envs.close()
    print(f"mean return: {np.mean(returns):.1f}")


if __name__ == "__main__":
    main()
