"""PettingZoo games as Gymnasium vector envs, with one row per agent.

The episodes of a game's rows begin and end together. The row of an agent that has left
the game repeats its last observation, with reward 0, until the game is over.

envserve start examples/pettingzoo_agents.py --vector agents/RockPaperScissors-v2
"""

from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate


class AgentsEnv(VectorEnv[Any, Any, Any]):
    """Several copies of one game; the agents of each copy are consecutive rows."""

    def __init__(self, num_envs: int, game: str, **options: Any) -> None:
        """Create the games.

        Args:
          num_envs: Number of rows, a multiple of the number of agents.
          game: Name of a module that has a function `parallel_env`.
          options: Keyword arguments of `parallel_env`.
        """
        make = import_module(game).parallel_env
        first = make(**options)
        self.agents = first.possible_agents
        if num_envs % len(self.agents):
            count = len(self.agents)
            raise ValueError(
                f"num_envs: expected a multiple of {count}; got {num_envs}"
            )
        self.num_envs = num_envs
        others = [make(**options) for _ in range(num_envs // len(self.agents) - 1)]
        self.games = [first, *others]
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "reset_mask": True}
        self.single_observation_space = first.observation_space(self.agents[0])
        self.single_action_space = first.action_space(self.agents[0])
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._observations: list[Any] = [None] * num_envs
        self._terminated = np.zeros(num_envs, bool)

    def rows_of(self, number: int) -> range:
        """Return the indices of the rows of one copy of the game."""
        return range(number * len(self.agents), (number + 1) * len(self.agents))

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all games, or only those that have a row in `options["reset_mask"]`."""
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        if isinstance(seed, int):
            seed = [seed + row for row in range(self.num_envs)]
        for number in range(len(self.games)):
            rows = self.rows_of(number)
            if mask[rows].any():
                self._begin(number, seed[rows.start] if seed else None)
        return self._observation(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all games; reset the games that ended in the previous step."""
        row_actions = list(iterate(self.action_space, actions))
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        for number, game in enumerate(self.games):
            rows = self.rows_of(number)
            if not game.agents:
                self._begin(number, None)
                continue
            row_of = dict(zip(self.agents, rows, strict=True))
            chosen = {agent: row_actions[row_of[agent]] for agent in game.agents}
            observations, game_rewards, game_terminated, _, _ = game.step(chosen)
            for agent in chosen:
                row = row_of[agent]
                self._observations[row] = observations[agent]
                rewards[row] = game_rewards[agent]
                self._terminated[row] = game_terminated[agent]
            if not game.agents:
                terminated[rows] = self._terminated[rows]
                truncated[rows] = ~self._terminated[rows]
        return self._observation(), rewards, terminated, truncated, {}

    def _begin(self, number: int, seed: int | None) -> None:
        observations, _ = self.games[number].reset(seed=seed)
        for row, agent in zip(self.rows_of(number), self.agents, strict=True):
            self._observations[row], self._terminated[row] = observations[agent], False

    def _observation(self) -> Any:
        empty: Any = create_empty_array(self.single_observation_space, self.num_envs)
        return concatenate(self.single_observation_space, self._observations, empty)

    def close_extras(self, **_: Any) -> None:
        """Close the games."""
        for game in self.games:
            game.close()


for _name, _game in {
    "RockPaperScissors-v2": "classic.rps_v2",
    "KnightsArchersZombies-v11": "butterfly.knights_archers_zombies_v11",
}.items():
    gymnasium.register(
        f"agents/{_name}",
        vector_entry_point=AgentsEnv,  # type: ignore[arg-type]
        kwargs={"game": f"pettingzoo.{_game}"},
    )
