"""The iterations of a training run: collect a rollout and update the agent.

With `overlap`, the next rollout is collected during the update. The update then runs in
a second thread, while the calling thread steps the envs and runs the rollout loop. The
two share no variables, because the rollout uses `Updater.acting`, a copy of the
parameters from before the update.
"""

import collections
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from ppo.agent.agent import Agent
from ppo.agent.normalize import ReturnScale
from ppo.config.config import Config
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.learning.update import Updater
from ppo.rollout import Episode, EpisodeTracker, LostSteps, Rollout, info_means
from ppo.run_folder.checkpoint import Counters, training_state
from ppo.simulate import Simulation

__all__ = ["TrainingRun"]

_RECENT_EPISODES = 100


class TrainingRun:
    """State of a training run; callbacks receive it as their first argument.

    Attributes:
        config: The settings.
        agent: The agent being trained.
        env: The training envs. Callbacks may use `set_attr`, `get_attr` and
            `call_each`, but must not step or reset the envs.
        counters: Iterations and env steps so far, including those before a resume.
        rollout: The last rollout.
    """

    def __init__(
        self,
        config: Config,
        env: BatchEnv,
        counters: Counters,
        policy_loss: Callable[..., tf.Tensor],
        on_step: Callable[[], None],
        learners: Learners = SINGLE_LEARNER,
    ) -> None:
        self.config, self.env, self.counters = config, env, counters
        self.is_stopped = False
        self.learners, share = learners, config.per_learner(learners.num)
        self.agent = Agent(env.observation_space, env.action_space, config)
        graph_env = InGraphBatchEnv(env, self.agent.actions)
        self.updater = Updater(self.agent, share, policy_loss, learners)
        self.return_scale = ReturnScale(share.num_envs, config.discount)
        self.simulation = Simulation(
            graph_env,
            self.agent.act_from,
            config.horizon,
            on_step,
            snapshot=self.agent.snapshot,
            log_prob=self.agent.log_prob,
            noise=self._noise,
            state_sizes=self.agent.state_sizes,
            sequence_length=config.sequence_length,
            num_rollouts=1 + config.overlap,
        )
        self.state = training_state(self.agent, self.updater, self.return_scale)
        self._next_rollout: Future[Rollout] | None = None
        self.tracker = EpisodeTracker(share.num_envs)
        self.recent = collections.deque[Episode](maxlen=_RECENT_EPISODES)
        self.lost_steps = LostSteps()

    def stop(self) -> None:
        """End training after this iteration, even if steps remain."""
        self.is_stopped = True

    def _noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        """Draw noise for the rows of all learners, and return this learner's part."""
        learners = self.learners
        noise = self.agent.actions.noise(num_rows * learners.num, seed)
        if learners.num == 1:
            return noise
        inner = noise.shape[1:]
        parts = tf.reshape(noise, [self.config.horizon, learners.num, -1, *inner])
        return tf.reshape(parts[:, learners.index], [num_rows, *inner])

    def _seeds(self, iteration: int) -> list[tuple[int, int]]:
        """Return the seeds for the action noise and for shuffling the rows."""
        seeds = np.random.SeedSequence(self.config.seed, spawn_key=(iteration,))
        act_0, act_1, shuffle_0, shuffle_1 = map(int, seeds.generate_state(4) >> 1)
        return [(act_0, act_1), (shuffle_0, shuffle_1)]

    def _collect(self, iteration: int) -> Rollout:
        """Return the rollout that was collected during the last update, or a new one.

        If collecting it failed during the update, the exception is raised here.
        """
        if self._next_rollout is not None:
            future, self._next_rollout = self._next_rollout, None
            return future.result()
        return self.simulation.run(self._seeds(iteration)[0], self.updater.acting)

    def _learn(self, rollout: Rollout, after: Counters) -> dict[str, float]:
        counters = self.counters
        if after.steps == counters.steps:
            return {}
        return self.updater.update(
            rollout,
            reward_scale=self.return_scale.factor,
            progress=counters.steps / self.config.planned_steps,
            seed=self._seeds(counters.iteration)[1],
        )

    def _learn_and_collect(self, rollout: Rollout, after: Counters) -> dict[str, float]:
        """Update in another thread while this one collects the next rollout.

        If collecting fails, the next `_collect` raises the exception, so that this
        iteration can still be completed and saved.
        """
        acting, snapshot = self.updater.acting, self.agent.snapshot()
        tf.nest.map_structure(lambda old, new: old.assign(new), acting, snapshot)
        with ThreadPoolExecutor(1) as pool:
            learned = pool.submit(self._learn, rollout, after)
            if not self.config.is_finished_after(after.steps):
                seed, _ = self._seeds(after.iteration)
                self._next_rollout = Future()
                try:
                    self._next_rollout.set_result(self.simulation.run(seed, acting))
                except Exception as error:
                    self._next_rollout.set_exception(error)
        return learned.result()

    def iterate(self) -> dict[str, float]:
        """Collect one rollout, update the agent, and return the metrics."""
        config, counters, learners = self.config, self.counters, self.learners
        started = time.perf_counter()
        self.rollout = rollout = self._collect(counters.iteration)
        episodes = self.tracker.add(rollout, self.simulation.infos)
        newest = episodes[-_RECENT_EPISODES // learners.num :]
        lost = rollout.done & ~rollout.valid
        parts = learners.gather((int(rollout.valid.sum()), int(lost.sum()), newest))
        collected = time.perf_counter()
        num_valid, num_lost = (sum(part[index] for part in parts) for index in (0, 1))
        after = Counters(counters.iteration + 1, counters.steps + num_valid)
        self.recent.extend(Episode(*each) for part in parts for each in part[2])
        # Updated before the learning step, because rewards are stored unscaled.
        ends = rollout.done, rollout.valid
        self.return_scale.update(rollout.reward, *ends, learners)
        learn = self._learn_and_collect if config.overlap else self._learn
        learned = learn(rollout, after)
        # Updated after the learning step, because the stored log-probabilities depend
        # on the previous statistics.
        observation = tf.nest.map_structure(
            lambda leaf: leaf[:-1].reshape(-1, *leaf.shape[2:]), rollout.observation
        )  # [T + 1, B, ...] -> [T * B, ...]
        self.agent.preprocess.update(observation, rollout.valid.reshape(-1), learners)
        self.counters = after
        finished = time.perf_counter()
        return {
            "iteration": self.counters.iteration,
            "mean_return": self.mean_return,
            "mean_length": _mean([episode.length for episode in self.recent]),
            "invalid_steps": float(config.steps_per_iteration - num_valid),
            "lost_episodes": float(num_lost),
            "valid_fraction": num_valid / config.steps_per_iteration,
            "rollout_seconds": collected - started,
            "update_seconds": finished - collected,
            **info_means(self.recent),
            **learned,
        }

    def statistics(self) -> dict[str, float]:
        """Return metrics of the observation normalisation and the reward scale."""
        statistics = self.agent.preprocess.statistics()
        if self.config.scale_rewards:
            statistics["reward_scale"] = float(self.return_scale.factor)
        return statistics

    @property
    def is_finished(self) -> bool:
        """Whether the run has completed its steps, or a callback has stopped it."""
        return self.is_stopped or self.config.is_finished_after(self.counters.steps)

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 episodes; NaN before the first one ends."""
        return _mean([episode.total_reward for episode in self.recent])


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
