"""CartPole as a batched simulator in JAX, trained with Stable-Baselines3's PPO.

`step` does not reset rows whose episode has ended. envserve resets such rows with
`reset_mask`, after it has read the final observation of the episode.

python examples/jax_env.py [--connect tcp://sim1:5555 tcp://sim2:5555]
envserve start examples/jax_env.py --vector jax/CartPole-v0
"""

import argparse
from typing import Any

import gymnasium
import jax  # pip install '.[trainers]'
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

NAME = "jax/CartPole-v0"


@jax.jit
def reset_rows(keys: Any, state: Any, mask: Any) -> Any:
    """Reset the rows whose mask is true; return all random keys and states."""
    new_keys, draws = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
    start = jax.vmap(lambda key: jax.random.uniform(key, (4,), float, -0.05, 0.05))
    mask = mask[:, None]
    return jnp.where(mask, new_keys, keys), jnp.where(mask, start(draws), state)


@jax.jit
def step_rows(state: Any, actions: Any) -> Any:
    """Return the states after a step, and a mask of the rows that terminated."""
    _, velocity, angle, angular_velocity = state.T
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    force = jnp.where(actions == 1, 10.0, -10.0)
    push = (force + 0.05 * angular_velocity**2 * sine) / 1.1
    inertia = 0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1)
    angular_acceleration = (9.8 * sine - cosine * push) / inertia
    acceleration = push - 0.05 * angular_acceleration * cosine / 1.1
    derivatives = (velocity, acceleration, angular_velocity, angular_acceleration)
    state = state + 0.02 * jnp.stack(derivatives, axis=1)
    limits = jnp.array([2.4, jnp.inf, 0.2095, jnp.inf])
    return state, (jnp.abs(state) > limits).any(axis=1)


class JaxCartPole(VectorEnv[Any, Any, Any]):
    """Gymnasium's CartPole, with one compiled call for all rows."""

    def __init__(self, num_envs: int, time_limit: int = 500) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.num_envs, self.time_limit = num_envs, time_limit
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,))
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        seeds = np.random.SeedSequence().generate_state(num_envs)
        self.keys = jax.vmap(jax.random.PRNGKey)(seeds)
        self.state = jnp.zeros((num_envs, 4))
        self.time = np.zeros(num_envs, int)

    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or only the rows whose `options["reset_mask"]` is true."""
        if isinstance(seed, int):
            seed = [seed + row for row in range(self.num_envs)]
        for row, row_seed in enumerate(seed or []):
            if row_seed is not None:
                self.keys = self.keys.at[row].set(jax.random.PRNGKey(row_seed))
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.keys, self.state = reset_rows(self.keys, self.state, mask)
        self.time[mask] = 0
        return np.asarray(self.state), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all rows; the caller resets rows whose episode has ended."""
        self.state, terminated = step_rows(self.state, actions)
        self.time += 1
        truncated = self.time >= self.time_limit
        rewards = np.ones(self.num_envs)
        return np.asarray(self.state), rewards, np.asarray(terminated), truncated, {}


gymnasium.register(
    NAME,
    vector_entry_point=JaxCartPole,  # type: ignore[arg-type]
)


def main() -> None:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy

    from envserve.sb3 import make_vec_env

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", nargs="+", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    local: dict[str, Any] = {"num_workers": 1, "import_modules": [__file__]}
    options = {"vectorized": True, "seed": args.seed, **({} if args.connect else local)}
    envs = make_vec_env(NAME, 8, args.connect, **options)
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
    model.learn(args.steps)
    average, _ = evaluate_policy(model, envs, n_eval_episodes=8)
    envs.close()
    print(f"average return: {average:.1f}")


if __name__ == "__main__":
    main()
