"""Iterations of PPO in float64 NumPy, without the code of the trainer.

This follows the papers (Schulman et al. 2016 for advantages, 2017 for the objective,
Kingma and Ba 2015 for Adam, Ye et al. 2020 for the dual clip, Hafner et al. 2017 for
the penalty) and the pages "PPO in this repository" and "Decisions". Gradients are
computed by hand-written backpropagation, and running statistics from all rows so far.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Space

from ppo.config import Config
from ppo.rollout import Rollout

Array = np.ndarray
LOG_TWO_PI = np.log(2.0 * np.pi)


class Gaussian:
    """Independent normal distributions; parameters are means and log deviations.

    As in all distributions below, `log_prob`, `entropy` and `kl` return `[N]`, and the
    methods `d_...` return their derivatives with respect to the parameters, `[N, K]`.
    """

    def __init__(self, parameters: Array) -> None:
        self.mean, self.log_std = np.split(parameters, 2, axis=1)
        self.std = np.exp(self.log_std)

    def log_prob(self, action: Array) -> Array:
        squares = ((action - self.mean) / self.std) ** 2
        return -(0.5 * squares + self.log_std + 0.5 * LOG_TWO_PI).sum(axis=1)

    def d_log_prob(self, action: Array) -> Array:
        deviation = (action - self.mean) / self.std
        return np.hstack([deviation / self.std, deviation**2 - 1.0])

    def entropy(self) -> Array:
        return (self.log_std + 0.5 * (LOG_TWO_PI + 1.0)).sum(axis=1)

    def d_entropy(self) -> Array:
        return np.hstack([np.zeros_like(self.mean), np.ones_like(self.mean)])

    def kl(self, new: "Gaussian") -> Array:
        """Return KL(self || new)."""
        squares = self.std**2 + (self.mean - new.mean) ** 2
        terms = new.log_std - self.log_std + squares / (2.0 * new.std**2) - 0.5
        return terms.sum(axis=1)

    def d_kl(self, old: "Gaussian") -> Array:
        """Return the derivatives of KL(old || self)."""
        shift = self.mean - old.mean
        squares = old.std**2 + shift**2
        return np.hstack([shift / self.std**2, 1.0 - squares / self.std**2])


class SquashedGaussian(Gaussian):
    """Distributions of the tanh of normal variables, given actions before tanh.

    The entropy uses Gauss-Hermite quadrature with 16 nodes, like the trainer.
    """

    def __init__(self, parameters: Array) -> None:
        super().__init__(parameters)
        nodes, weights = np.polynomial.hermite.hermgauss(16)
        self.nodes, self.weights = np.sqrt(2.0) * nodes, weights / np.sqrt(np.pi)
        self.points = self.mean[..., None] + self.std[..., None] * self.nodes

    def log_prob(self, action: Array) -> Array:
        slopes = 1.0 / np.cosh(action) ** 2
        return super().log_prob(action) - np.log(slopes).sum(axis=1)

    def entropy(self) -> Array:
        log_slopes = -2.0 * np.log(np.cosh(self.points))
        return super().entropy() + (log_slopes @ self.weights).sum(axis=1)

    def d_entropy(self) -> Array:
        by_point = -2.0 * np.tanh(self.points)
        by_log_std = (by_point * self.nodes) @ self.weights * self.std
        return super().d_entropy() + np.hstack([by_point @ self.weights, by_log_std])


class Choices:
    """Independent choices; parameters are the logits of all options."""

    def __init__(self, logits: Array, allowed: Array, sizes: Sequence[int]) -> None:
        ends = np.cumsum(sizes)
        self.parts = [slice(end - n, end) for end, n in zip(ends, sizes, strict=True)]
        self.probability = np.zeros_like(logits)
        for part in self.parts:
            flags = allowed[:, part] | ~allowed[:, part].any(axis=1, keepdims=True)
            weights = np.where(flags, np.exp(logits[:, part]), 0.0)
            self.probability[:, part] = weights / weights.sum(axis=1, keepdims=True)
        # Forbidden options contribute nothing, although their logarithm is infinite.
        is_possible = self.probability > 0.0
        self.surprise = -np.log(np.where(is_possible, self.probability, 1.0))

    def _chosen(self, action: Array) -> Array:
        choices = action.reshape(len(self.probability), -1).T
        parts = zip(choices, self.parts, strict=True)
        return np.hstack(
            [np.eye(part.stop - part.start)[choice] for choice, part in parts]
        )

    def log_prob(self, action: Array) -> Array:
        return -(self._chosen(action) * self.surprise).sum(axis=1)

    def d_log_prob(self, action: Array) -> Array:
        return self._chosen(action) - self.probability

    def entropy(self) -> Array:
        return (self.probability * self.surprise).sum(axis=1)

    def d_entropy(self) -> Array:
        derivatives = self.probability * self.surprise
        for part in self.parts:
            entropy = derivatives[:, part].sum(axis=1, keepdims=True)
            derivatives[:, part] -= self.probability[:, part] * entropy
        return derivatives

    def kl(self, new: "Choices") -> Array:
        """Return KL(self || new)."""
        return (self.probability * (new.surprise - self.surprise)).sum(axis=1)

    def d_kl(self, old: "Choices") -> Array:
        """Return the derivatives of KL(old || self)."""
        return self.probability - old.probability


class Bits:
    """Independent bits; parameters are the log odds of ones."""

    def __init__(self, logits: Array) -> None:
        self.logits = logits
        self.one = 1.0 / (1.0 + np.exp(-logits))

    def log_prob(self, action: Array) -> Array:
        return np.log(np.where(action == 1, self.one, 1.0 - self.one)).sum(axis=1)

    def d_log_prob(self, action: Array) -> Array:
        return action - self.one

    def entropy(self) -> Array:
        return self._cross_entropy(self.one).sum(axis=1)

    def d_entropy(self) -> Array:
        return -self.logits * self.one * (1.0 - self.one)

    def kl(self, new: "Bits") -> Array:
        """Return KL(self || new)."""
        return (new._cross_entropy(self.one) - self._cross_entropy(self.one)).sum(1)

    def d_kl(self, old: "Bits") -> Array:
        """Return the derivatives of KL(old || self)."""
        return self.one - old.one

    def _cross_entropy(self, one: Array) -> Array:
        return -one * np.log(self.one) - (1.0 - one) * np.log(1.0 - self.one)


def forward(layers: Sequence[Array], rows: Array) -> list[Array]:
    """Return the inputs of each layer of a tanh perceptron, and its outputs.

    Args:
      layers: Kernels and biases in turn.
      rows: Inputs, `[N, D]`.
    """
    arrays = [rows]
    for kernel, bias in zip(layers[::2], layers[1::2], strict=True):
        arrays.append(arrays[-1] @ kernel + bias)
        if len(arrays) <= len(layers) // 2:
            arrays[-1] = np.tanh(arrays[-1])
    return arrays


def backward(layers: Sequence[Array], arrays: list[Array], slope: Array) -> list[Array]:
    """Return the gradients of kernels and biases, given those of the outputs."""
    gradients: list[Array] = []
    for kernel, rows in zip(layers[-2::-2], arrays[-2::-1], strict=True):
        gradients = [rows.T @ slope, slope.sum(axis=0), *gradients]
        slope = (slope @ kernel.T) * (1.0 - rows**2)
    return gradients


def mean_of(rows: Array) -> float:
    return float(rows.sum()) / max(len(rows), 1)


class Reference:
    """A training run that gets its rollouts and the order of rows from another one.

    Args:
      config: The settings of the run.
      observation_space: Observation space of one env, with one Box.
      action_space: Action space of one env.
      policy: Initial kernels and biases of the policy network in turn; then, unless
        they depend on the state, the log standard deviations.
      value: Initial kernels and biases of the value network.

    Attributes:
      networks: Current parameters of the policy network and of the value network.
      first_moments: Adam's first moments of all parameters.
      second_moments: Adam's second moments of all parameters.
    """

    def __init__(
        self,
        config: Config,
        observation_space: Space[Any],
        action_space: Any,
        policy: Sequence[Array],
        value: Sequence[Array],
    ) -> None:
        self.config = config
        self._observation_space = observation_space
        self._action_space = action_space
        self.networks = [
            [array.astype(np.float64) for array in network]
            for network in (policy, value)
        ]
        self.first_moments, self.second_moments = (
            [[np.zeros_like(array) for array in part] for part in self.networks]
            for _ in range(2)
        )
        self._num_gradient_steps = self._num_iterations = self._num_steps = 0
        self._kl_penalty = config.initial_kl_penalty
        self._observations: list[Array] = []  # of all valid rows so far
        self._discounted_returns: list[float] = []  # of all valid rows so far
        self._return_now = np.zeros(config.num_envs)
        self._episode_now: list[list[float]] = [[] for _ in range(config.num_envs)]
        self._episodes: list[list[float]] = []  # the rewards of each complete episode

    def iterate(
        self, rollout: Rollout, order_of_epoch: Callable[[int], Array]
    ) -> dict[str, float]:
        """Learn from a rollout, and return all metrics that do not measure time."""
        self._follow_rewards(rollout)
        metrics = self._update(rollout, order_of_epoch)
        box = self._box_of(rollout.observation)
        self._observations += list(box[:-1][rollout.valid])
        self._num_iterations += 1
        self._num_steps += int(rollout.valid.sum())
        recent = self._episodes[-100:]
        num_invalid = int((~rollout.valid).sum())
        mean, variance = self._moments()
        return {
            **metrics,
            "iteration": self._num_iterations,
            "mean_return": float(np.mean([sum(rewards) for rewards in recent])),
            "mean_length": float(np.mean([len(rewards) for rewards in recent])),
            "invalid_steps": num_invalid,
            "lost_episodes": int((~rollout.valid & rollout.done).sum()),
            "valid_fraction": 1.0 - num_invalid / rollout.valid.size,
            "reward_scale": self._reward_scale(),
            "observation_mean_min": mean.min(),
            "observation_mean_max": mean.max(),
            "observation_std_min": np.sqrt(variance.min()),
            "observation_std_max": np.sqrt(variance.max()),
        }

    def _follow_rewards(self, rollout: Rollout) -> None:
        """Track discounted returns and episodes, step by step."""
        for step, env in np.ndindex(*rollout.reward.shape):
            reward, done = float(rollout.reward[step, env]), rollout.done[step, env]
            if rollout.valid[step, env]:
                self._return_now[env] *= self.config.discount
                self._return_now[env] += reward
                self._discounted_returns.append(float(self._return_now[env]))
                self._episode_now[env].append(reward)
            else:
                assert done, "only rows of failed envs are expected, and no padding"
            if done:
                if rollout.valid[step, env]:
                    self._episodes.append(self._episode_now[env])
                self._return_now[env], self._episode_now[env] = 0.0, []

    def _reward_scale(self) -> float:
        return 1.0 / np.sqrt(np.var(self._discounted_returns) + 1e-8)

    def _moments(self) -> tuple[Array, Array]:
        if not self._observations:
            return np.zeros(1), np.ones(1)
        rows = np.array(self._observations)
        return rows.mean(axis=0), rows.var(axis=0)

    def _box_of(self, observation: Any) -> Array:
        if not isinstance(self._observation_space, Dict):
            return observation
        spaces = self._observation_space.spaces
        (name,) = (name for name, space in spaces.items() if isinstance(space, Box))
        return observation[name]

    def _inputs(self, observation: Any) -> tuple[Array, Array]:
        """Return network inputs and action masks of rows, `[N, D]` and `[N, K]`."""
        box = self._box_of(observation)
        mean, variance = self._moments()
        limit = self.config.observation_clip
        normal = np.clip((box - mean) / np.sqrt(variance + 1e-8), -limit, limit)
        normal = normal.reshape(-1, box.shape[-1])
        allowed = np.ones((len(normal), 1), np.bool_)
        parts = [normal]
        if isinstance(self._observation_space, Dict):
            spaces = self._observation_space.spaces
            allowed = observation["action_mask"].reshape(len(normal), -1) == 1
            parts = [
                observation[name].reshape(-1, 1) == space.start + np.arange(space.n)
                if isinstance(space := spaces[name], Discrete)
                else normal
                for name in sorted(spaces)
                if name != "action_mask"
            ]
        return np.hstack(parts), allowed

    def _policy(
        self, layers: list[Array], inputs: Array, allowed: Array
    ) -> tuple[Any, list[Array]]:
        """Return action distributions, and the arrays of the forward pass."""
        config, space = self.config, self._action_space
        if not isinstance(space, Box):
            arrays = forward(layers, inputs)
            if isinstance(space, MultiBinary):
                return Bits(arrays[-1]), arrays
            is_single = isinstance(space, Discrete)
            sizes = [space.n] if is_single else space.nvec.tolist()
            return Choices(arrays[-1], allowed, sizes), arrays
        if config.state_dependent_std:
            arrays = forward(layers, inputs)
            mean, log_std = np.split(arrays[-1], 2, axis=1)
            log_std = log_std + config.initial_log_std
        else:
            arrays = forward(layers[:-1], inputs)
            mean, log_std = arrays[-1], arrays[-1] * 0.0 + layers[-1]
        is_squashed = config.action_distribution == "squashed_gaussian"
        kind = SquashedGaussian if is_squashed else Gaussian
        return kind(np.hstack([mean, log_std])), arrays

    def _values(self, inputs: Array) -> Array:
        return forward(self.networks[1], inputs)[-1][:, 0]

    def _update(
        self, rollout: Rollout, order_of_epoch: Callable[[int], Array]
    ) -> dict[str, float]:
        config, size = self.config, rollout.reward.size
        planned = config.total_steps // size * size
        remaining = 1.0 - self._num_steps / planned
        coefficients = [
            number * (remaining if decays else 1.0)
            for number, decays in (
                (config.learning_rate, True),
                (config.clip_range, config.decay_clip_range),
                (config.entropy_coefficient, config.decay_entropy_coefficient),
            )
        ]
        valid = rollout.valid.ravel()
        inputs, allowed = self._inputs(rollout.observation)
        final_inputs, _ = self._inputs(rollout.final_observation)
        rows = {
            "inputs": inputs[:size],
            "allowed": allowed[:size],
            "action": rollout.action.reshape(size, -1),
            "log_prob": rollout.log_prob.ravel(),
            "old_value": self._values(inputs[:size]),
        }
        policy_rows = rows["inputs"][valid], rows["allowed"][valid]
        old_policy = [array.copy() for array in self.networks[0]]
        old, _ = self._policy(old_policy, *policy_rows)
        difference = old.log_prob(rows["action"][valid]) - rows["log_prob"][valid]
        rows |= self._advantages(rollout, inputs, final_inputs)
        target = rows["target"][valid]
        residual = target - rows["old_value"][valid]
        result = {
            "ratio_deviation": float(np.abs(np.exp(difference) - 1.0).max()),
            "explained_variance": 1.0 - residual.var() / (target.var() + 1e-8),
            "learning_rate": coefficients[0],
            "epochs_run": 0.0,
            "undone_epochs": 0.0,
            "kl": 0.0,
        }
        if "penalty" in config.objective:
            result["kl_penalty"] = self._kl_penalty
        for epoch in range(config.epochs):
            if config.recompute_advantages:
                rows |= self._advantages(rollout, inputs, final_inputs)
            policy, moments = self.networks[0], self.first_moments[0]
            before = [array.copy() for array in policy + moments]
            sums: dict[str, float] = {}
            order = order_of_epoch(epoch)
            for chunk in np.split(order, size // config.minibatch_size):
                chunk = chunk[valid[chunk]]
                batch = {name: array[chunk] for name, array in rows.items()}
                step = self._gradient_step(batch, old_policy, *coefficients)
                for name, number in step.items():
                    sums[name] = sums.get(name, 0.0) + number * len(chunk)
            means = {name: number / valid.sum() for name, number in sums.items()}
            new, _ = self._policy(self.networks[0], *policy_rows)
            kl = mean_of(old.kl(new))
            if result["undone_epochs"] or (config.max_kl and kl > config.max_kl):
                # Adam's second moments keep the steps that are undone.
                result["undone_epochs"] = 1.0
                policy[:], moments[:] = before[: len(policy)], before[len(policy) :]
                if epoch > 0:
                    of_value = ("value_loss", "gradient_norm")
                    means = {name: means[name] for name in of_value}
            else:
                result |= {"kl": kl, "epochs_run": result["epochs_run"] + 1.0}
            result |= means
        self._adapt(result["kl"] if result["epochs_run"] else np.inf)
        return result

    def _adapt(self, kl: float) -> None:
        if kl > 1.3 * self.config.kl_target:
            self._kl_penalty *= 1.5
        elif kl < 0.7 * self.config.kl_target:
            self._kl_penalty /= 1.5

    def _advantages(
        self, rollout: Rollout, inputs: Array, final_inputs: Array
    ) -> dict[str, Array]:
        """Compute generalised advantage estimates backwards in time, env by env."""
        config, shape = self.config, rollout.reward.shape
        limit = config.reward_clip
        reward = np.clip(rollout.reward * self._reward_scale(), -limit, limit)
        value = self._values(inputs).reshape(-1, shape[1])
        final_value = self._values(final_inputs).reshape(shape)
        advantage, target = np.zeros(shape), np.zeros(shape)
        for env in range(shape[1]):
            later = 0.0  # the advantage of the next step in the same episode
            for step in reversed(range(shape[0])):
                if not rollout.valid[step, env]:
                    later = 0.0
                    continue
                following = value[step + 1, env]
                if rollout.truncated[step, env]:
                    following, later = final_value[step, env], 0.0
                if rollout.terminated[step, env]:
                    following, later = 0.0, 0.0
                error = reward[step, env] - value[step, env]
                error += config.discount * following
                later = error + config.discount * config.gae_lambda * later
                advantage[step, env] = later
                target[step, env] = later + value[step, env]
        return {"advantage": advantage.ravel(), "target": target.ravel()}

    def _gradient_step(
        self,
        batch: dict[str, Array],
        old_policy: list[Array],
        rate: float,
        clip_range: float,
        entropy_coefficient: float,
    ) -> dict[str, float]:
        """Take one step of Adam, and return the metrics of the minibatch."""
        config, advantage = self.config, batch["advantage"]
        count = max(len(advantage), 1)
        if config.normalize_advantages:
            centred = advantage - advantage.mean()
            advantage = centred / (np.sqrt((centred**2).mean()) + 1e-8)
        policy, value_layers = self.networks
        policy_rows = batch["inputs"], batch["allowed"]
        new, arrays = self._policy(policy, *policy_rows)
        log_ratio = new.log_prob(batch["action"]) - batch["log_prob"]
        ratio = np.exp(log_ratio)
        gain, by_ratio = ratio * advantage, advantage
        if "clip" in config.objective:
            limited = np.where(
                advantage > 0.0,
                np.minimum(ratio, 1.0 + clip_range),
                np.clip(ratio, 1.0 - clip_range, 3.0),
            )
            gain, by_ratio = limited * advantage, advantage * (limited == ratio)
        policy_loss = -mean_of(gain)
        slope = -(by_ratio * ratio)[:, None] * new.d_log_prob(batch["action"])
        slope -= entropy_coefficient * new.d_entropy()
        if "penalty" in config.objective:
            old, _ = self._policy(old_policy, *policy_rows)
            kl = mean_of(old.kl(new))
            excess = max(kl - config.kl_cutoff_factor * config.kl_target, 0.0)
            cutoff = config.kl_cutoff_coefficient
            policy_loss += self._kl_penalty * kl + cutoff * excess**2
            slope += (self._kl_penalty + 2.0 * cutoff * excess) * new.d_kl(old)
        value_arrays = forward(value_layers, batch["inputs"])
        value, target = value_arrays[-1][:, 0], batch["target"]
        error, by_value = (value - target) ** 2, value - target
        if limit := config.value_clip_range:
            change = value - batch["old_value"]
            clipped = batch["old_value"] + np.clip(change, -limit, limit)
            is_larger = (clipped - target) ** 2 > error
            error = np.where(is_larger, (clipped - target) ** 2, error)
            by_value = np.where(is_larger, 0.0, by_value)
        value_slope = config.value_coefficient * by_value[:, None] / count
        if isinstance(new, Gaussian) and not config.state_dependent_std:
            by_mean, by_log_std = np.split(slope / count, 2, axis=1)
            gradients = backward(policy[:-1], arrays, by_mean)
            gradients.append(by_log_std.sum(axis=0))
        else:
            gradients = backward(policy, arrays, slope / count)
        norms = self._apply(
            [gradients, backward(value_layers, value_arrays, value_slope)], rate
        )
        return {
            "policy_loss": policy_loss,
            "value_loss": 0.5 * mean_of(error),
            "entropy": mean_of(new.entropy()),
            "approximate_kl": mean_of(ratio - 1.0 - log_ratio),
            "clip_fraction": mean_of(np.abs(ratio - 1.0) > clip_range),
            "gradient_norm": float(np.linalg.norm(norms)),
        }

    def _apply(self, gradients: list[list[Array]], rate: float) -> list[float]:
        """Clip gradients per network and apply Adam; return the norms before."""
        self._num_gradient_steps += 1
        count, limit = self._num_gradient_steps, self.config.max_gradient_norm
        rate *= np.sqrt(1.0 - 0.999**count) / (1.0 - 0.9**count)
        norms = []
        for network, part in enumerate(gradients):
            norms.append(np.sqrt(sum((array**2).sum() for array in part)))
            factor = min(1.0, limit / norms[-1])
            first, second = self.first_moments[network], self.second_moments[network]
            for index, gradient in enumerate(part):
                gradient = factor * gradient
                first[index] = 0.9 * first[index] + 0.1 * gradient
                second[index] = 0.999 * second[index] + 0.001 * gradient**2
                divisor = np.sqrt(second[index]) + self.config.adam_epsilon
                self.networks[network][index] -= rate * first[index] / divisor
        return norms
