"""The tasks: configs, budgets, numbers of seeds, and published scores.

`docs/scores.md` states the conditions of each published score (anchor): the measure,
the version of the env, and the number of seeds.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ppo.config import Config
from ppo.config.named_configs import CONFIGS

Measure = Literal["E", "B", "M"]
MEASURES: tuple[Measure, ...] = get_args(Measure)

#: Settings to ignore: they do not influence learning, or follow from the task or seed.
_IGNORED_SETTINGS = re.compile(
    "import_modules|preload|total_steps|seed|num_splits|act_on|spare_envs|jit_compile|"
    "use_gpu|on_fault|.*(evaluat|curve|report|checkpoint|timeout|server|padding|restart)"
    "|save_replay"
)


@dataclass(frozen=True)
class Task:
    """One row of the table.

    Attributes:
      measure: Measure of the goal. "E" is the mean return of episodes at the end. "B"
      is the best of 20 evaluations during training, averaged over seeds. For "M",
      each evaluation is averaged over seeds, and the best average counts. All
      measures use the most likely actions, and env seeds that training never used.
      num_seeds: Number of seeds, which are 0, 1, ...
      goal: Score to reach.
      anchors: Published scores with their measures; the goal's measure comes first.
      changes: Settings that differ from the config, such as a different env name.
      variant: Name of the changes, if the table also has a row without them.
      episodes: Episodes of the final evaluation (E).
    """

    config: str
    total_steps: int
    measure: Measure
    num_seeds: int
    goal: float
    anchors: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    episodes: int = 100

    @property
    def name(self) -> str:
        """Name of the task and its folder: `cheetah-1M`, `cheetah-1M-penalty`, ..."""
        return "-".join(filter(None, (self.config, self.budget, self.variant)))

    @property
    def budget(self) -> str:
        """Env steps as text, such as `300k`."""
        steps = self.total_steps
        return f"{steps // 10**6}M" if steps % 10**6 == 0 else f"{steps // 1000}k"

    @property
    def settings(self) -> dict[str, Any]:
        """The current settings that influence learning and are not 0, False or ""."""
        values = json.loads(json.dumps(vars(self.make_config(0))))
        table = values.pop("algorithm_settings")
        used = {k: v for k, v in values.items() if v and not _IGNORED_SETTINGS.match(k)}
        table = {k: v for k, v in table.items() if not _IGNORED_SETTINGS.match(k)}
        return used | ({"algorithm_settings": table} if table else {})

    def is_made_by(self, settings: Mapping[str, Any] | None) -> bool:
        """Return whether the recorded settings of a run equal the current ones.

        A setting that is not recorded did not exist at that time. It is assumed to have
        had its current value if this value is a string, and to have been off otherwise.
        """
        texts = {k: v for k, v in self.settings.items() if isinstance(v, str)}
        return settings is not None and texts | dict(settings) == self.settings

    def make_config(self, seed: int) -> Config:
        """Return the config of one run, with 20 evaluations during training."""
        return CONFIGS[self.config].replace(
            **{
                "total_steps": self.total_steps,
                "seed": seed,
                "evaluate_every": self.total_steps // 20,
                "evaluation_episodes": self.episodes,
                **self.changes,
            }
        )


_K, _M = 10**3, 10**6
_MEMORY = {
    "env_name": "CartPoleNoVelocity-v1",
    "import_modules": ["benchmarks.scores.cartpole_without_velocity"],
    "recurrent_size": 64,
    "sequence_length": 32,
    "minibatch_size": 256,
    "learning_rate": 1e-3,
}
_PENALTY = {"objective": "penalty"}
_PONG = {"num_envs": 32, "horizon": 32, "curve_episodes": 4}

RANDOM_RETURNS = {
    "CartPole-v1": 23.7,
    "CartPoleNoVelocity-v1": 23.7,
    "Acrobot-v1": -497.1,
    "Pendulum-v1": -1207.6,
    "MountainCarContinuous-v0": -33.3,
    "LunarLander-v3": -192.0,
    "LunarLanderContinuous-v3": -212.7,
    "BipedalWalker-v3": -102.8,
    "InvertedPendulum-v5": 5.2,
    "InvertedDoublePendulum-v5": 49.1,
    "Reacher-v5": -43.3,
    "Swimmer-v5": -3.1,
    "Hopper-v5": 24.8,
    "HalfCheetah-v5": -264.0,
    "Walker2d-v5": 2.2,
    "Ant-v4": -44.1,
    "Ant-v5": -45.2,
    "Humanoid-v5": 105.6,
    "PongNoFrameskip-v4": -20.7,
}
"""Maps envs to mean returns of random actions over at least 20 episodes; for Pong, the
value is that of Mnih et al. 2015."""

TASKS: tuple[Task, ...] = (
    Task("cartpole", 50 * _K, "E", 5, 500, "E rl-zoo DQN 500"),
    Task("cartpole", 100 * _K, "E", 5, 500, "E rl-zoo 500"),
    Task("cartpole", 100 * _K, "E", 5, 500, "E rl-zoo LSTM 500", _MEMORY, "recurrent"),
    Task("acrobot", 300 * _K, "E", 5, -70, "E rl-zoo -73.5 at 1M"),
    Task("pendulum", 100 * _K, "E", 5, -172, "E rl-zoo -172.2", episodes=1000),
    Task("pendulum-sac", 20 * _K, "E", 5, -150, "E rl-zoo SAC -176.3", episodes=1000),
    Task("pendulum", 300 * _K, "E", 5, -153, "E rl-zoo -172.2 at 100k", episodes=1000),
    Task(
        "mountain_car_continuous",
        100 * _K,
        "E",
        5,
        92,
        "E rl-zoo 88.3 at 20k, TRPO 92.5 at 50k",
    ),
    Task("lunar_lander", _M, "E", 5, 280, "E rl-zoo 242.1"),
    Task("lunar_lander_continuous", _M, "E", 5, 275, "E rl-zoo 270.9"),
    Task("bipedal_walker", 5 * _M, "E", 3, 290, "E rl-zoo 287.9"),
    Task("inverted_pendulum", 300 * _K, "E", 5, 1000, "E TF-Agents 1000 at 1M"),
    Task("double_pendulum", _M, "E", 5, 9300, "E TF-Agents 9353; M XuanCe 9344"),
    Task("reacher", _M, "E", 5, -3.7, "E TF-Agents -7.7; M Tianshou -4.1"),
    Task("swimmer", _M, "E", 5, 355, "E rl-zoo 281.6, TRPO 365.7"),
    Task("hopper", _M, "E", 5, 3500, "E TF-Agents 2530, TRPO 3618; M Tianshou 2609"),
    Task("cheetah", _M, "E", 5, 6500, "E rl-zoo 5819; M Tianshou 5784, XuanCe 5371"),
    Task("cheetah", _M, "E", 5, 4239, "E TF-Agents 4239 (clip)", _PENALTY, "penalty"),
    Task("walker", _M, "M", 5, 4900, "M XuanCe 4371, Tianshou 3588; E TRPO 4933"),
    Task("ant", _M, "M", 5, 984, "M Tianshou 984", {"env_name": "Ant-v4"}, "v4"),
    Task("ant", _M, "E", 5, 2500, "E rl-zoo 1327 (v3); M XuanCe 1394"),
    Task(
        "cheetah-sac",
        _M,
        "E",
        3,
        10_000,
        "E rl-zoo SAC 9535; M XuanCe SAC 10231, Tianshou SAC 12139",
    ),
    Task("hopper-sac", _M, "E", 3, 3200, "E rl-zoo SAC 2326; M Tianshou SAC 3542"),
    Task("walker-sac", _M, "E", 3, 4500, "E rl-zoo SAC 3863; M Tianshou SAC 5007"),
    Task("ant-sac", _M, "E", 3, 4500, "E rl-zoo SAC 4616; M Tianshou SAC 5850"),
    Task("cheetah", 3 * _M, "M", 3, 7340, "M Tianshou 7337"),
    Task("walker", 3 * _M, "E", 3, 5200, "E SF 5488 at 10M; M Tianshou 4896"),
    Task("hopper", 3 * _M, "E", 3, 3600, "E TRPO 3618 at 1M; M Tianshou 3128"),
    Task("ant", 3 * _M, "E", 3, 4000, "E TRPO 4982 at 1M (v3); M Tianshou 4079 (v3)"),
    Task("humanoid", 3 * _M, "E", 3, 2500, "E SF 5439 at 10M; M Tianshou 1360 (v3)"),
    Task("cheetah", 10 * _M, "E", 3, 8500, "E SF 6263"),
    Task("humanoid", 10 * _M, "E", 3, 5000, "E SF 5439 (v4)"),
    Task("pong", 3 * _M, "E", 1, 20, "E rl-zoo 20.99 at 10M", _PONG),
)
"""Tasks in the order of the table. TRPO is from RL Zoo; SF is Sample Factory."""
