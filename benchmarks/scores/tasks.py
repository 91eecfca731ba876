"""What is run: configs, budgets, numbers of seeds, and the scores to compare with.

An anchor holds under its own conditions only, which `docs/scores.md` says: the metric,
the version of the env, the policy's mode or samples, the number of seeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ppo.config import Config
from ppo.configs import CONFIGS

Metric = Literal["E", "B"]


@dataclass(frozen=True)
class Task:
    """One row of the table.

    Attributes:
      metric: "E" for the mean of 100 episodes at the end, "B" for the best mean of 20
        episodes along the curve; both with mode actions, on envs that training never
        saw.
      num_seeds: Seeds 0, 1, ... of the runs.
      goal: What the mean over seeds should reach.
      anchor: Where the goal comes from.
      changes: Settings that differ from the config's, such as another env's name.
    """

    config: str
    total_steps: int
    metric: Metric
    num_seeds: int
    goal: float
    anchor: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Config and budget, such as `cheetah-1M`: also the name of the folder."""
        return f"{self.config}-{_short(self.total_steps)}"

    def make_config(self, seed: int) -> Config:
        """Return the config of one run, with 20 evaluations along its curve."""
        return CONFIGS[self.config].replace(
            **{
                "total_steps": self.total_steps,
                "seed": seed,
                "evaluate_every": self.total_steps // 20,
                **self.changes,
            }
        )


def _short(steps: int) -> str:
    return f"{steps // 10**6}M" if steps % 10**6 == 0 else f"{steps // 1000}k"


TASKS: tuple[Task, ...] = (
    Task("cartpole", 100_000, "E", 5, 500, "rl-zoo 500.0"),
    Task("acrobot", 300_000, "E", 5, -81, "SLM-Lab -81.3"),
    Task("pendulum", 100_000, "E", 5, -172, "rl-zoo -172.2"),
    Task("pendulum", 300_000, "E", 5, -155, "RPO -151.1 at 8M"),
    Task("inverted_pendulum", 300_000, "E", 5, 1000, "Tianshou 1000 at 1M"),
    Task("double_pendulum", 1_000_000, "B", 5, 9350, "TF-Agents 9353"),
    Task("reacher", 1_000_000, "B", 5, -4.1, "Tianshou -4.1"),
    Task("lunar_lander", 1_000_000, "E", 3, 242, "rl-zoo 242.1"),
    Task("swimmer", 1_000_000, "B", 3, 280, "rl-zoo 281.6"),
    Task("hopper", 1_000_000, "B", 5, 2610, "Tianshou 2609"),
    Task("cheetah", 1_000_000, "B", 5, 5820, "rl-zoo 5819, Tianshou 5784"),
    Task("walker", 1_000_000, "B", 5, 3590, "Tianshou 3588"),
    Task("ant", 1_000_000, "B", 3, 984, "Tianshou 2.0 984", {"env_name": "Ant-v4"}),
    Task("cheetah", 3_000_000, "B", 3, 7340, "Tianshou 7337"),
    Task("walker", 3_000_000, "B", 3, 4900, "Tianshou 4896"),
    Task("hopper", 3_000_000, "B", 3, 3130, "Tianshou 3128"),
)
"""In the order of the table."""
