"""The iterations of a training run: collect a rollout and update the agent.

With `overlap`, the next rollout is collected during the update. The update then runs in
a second thread, while the calling thread steps the envs and runs the rollout loop. The
two threads share no variables, because the rollout uses a copy of the parameters from
before the update.
"""

import collections
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from ppo.algorithms.algorithm import Algorithm
from ppo.config.config import Config
from ppo.errors import ConfigError, TrainingStopped
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.rollout import (
    Episode,
    EpisodeTracker,
    LostSteps,
    Rollout,
    info_means,
    num_non_finite,
    step_arrays,
)
from ppo.run_folder.checkpoint import Counters, training_state, variables
from ppo.simulate import Simulation
from ppo.user_code import check_metric_names

__all__ = ["TrainingRun"]

_RECENT_EPISODES = 100  # number of episodes that `mean_return` averages


class TrainingRun:
    """State of a training run; callbacks receive it as their first argument.

    Attributes:
      config: The settings.
      agent: The agent being trained.
      algorithm: The algorithm that trains the agent.
      env: The training envs. Callbacks may use `set_attr`, `get_attr` and
        `call_each`, but must not step or reset the envs.
      counters: Iterations and env steps of the run, also from before a resume.
      rollout: The last rollout.
    """

    def __init__(
        self,
        config: Config,
        env: BatchEnv,
        counters: Counters,
        algorithm: type[Algorithm],
        on_step: Callable[[], None],
        learners: Learners = SINGLE_LEARNER,
    ) -> None:
        self.config, self.env, self.counters = config, env, counters
        self.is_stopped = False
        self.learners = learners
        learner_config = config.per_learner(learners.num)
        self.agent = algorithm.make_agent(
            env.observation_space, env.action_space, config
        )
        graph_env = InGraphBatchEnv(env, self.agent.actions)
        self.algorithm = algorithm(self.agent, learner_config, learners)
        self.simulation = Simulation(
            graph_env,
            self.agent.act_from,
            config.horizon,
            on_step,
            snapshot=self.agent.snapshot,
            in_numpy=self.agent.in_numpy,
            log_prob=self.agent.log_prob,
            noise=self._noise,
            state_sizes=self.agent.state_sizes,
            sequence_length=config.sequence_length,
            act_on=config.act_on,
            num_rollouts=1 + config.overlap,
        )
        # With `overlap`, a copy of the agent's variables, which rollouts use.
        self._snapshot: Any = None
        self._acting: dict[str, Any] = {}
        if config.overlap:
            self._snapshot = tf.nest.map_structure(
                lambda value: tf.Variable(value, trainable=False), self.agent.snapshot()
            )
            self._acting["acting"] = tf.nest.flatten(self._snapshot)
        got: Any = self.algorithm.trackables
        try:
            parts = self.agent.trackables, self.algorithm.trackables
            for got in tf.nest.flatten(parts):
                if not getattr(got, "built", True):
                    raise ConfigError(
                        f"algorithm {config.algorithm}: expected trackables with "
                        f"variables; got {type(got).__name__}, which is not built yet; "
                        "build it in __init__, so that a checkpoint can restore it."
                    )
                # A checkpoint ignores numbers in nested dicts and lists.
                tf.train.Checkpoint(part=got)
            got = self.algorithm.trackables
            variables(self.state)  # raises if a nested dict has keys that are not str
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"algorithm {config.algorithm}: expected trackables, a dict from names "
                "other than agent and acting to optimizers, Keras models, variables or "
                f"tf.train.Checkpoints, got {got!r:.200}."
            ) from error
        #: Function that is called with this run between the rollout and the update; it
        #: returns metrics.
        self.before_update: Callable[[Any], dict[str, float]] = lambda run: {}
        self._next_rollout: Future[Rollout] | None = None
        self._statistics: dict[str, float] | None = None  # of the last iteration
        self.tracker = EpisodeTracker(learner_config.num_envs)
        self.recent = collections.deque[Episode](maxlen=_RECENT_EPISODES)
        self.lost_steps = LostSteps(config.horizon)

    @property
    def state(self) -> tf.train.Checkpoint:
        """All objects that a checkpoint must store, as they are now."""
        return training_state(
            self.agent, dict(**self.algorithm.trackables, **self._acting)
        )

    def stop(self) -> None:
        """End training after this iteration, even if steps remain."""
        self.is_stopped = True

    def _noise(self, num_rows: int, seed: tf.Tensor) -> tf.Tensor:
        """Sample action noise for the rows of all learners; return this learner's part.

        The noise of an env therefore does not depend on the number of learners.
        """
        learners = self.learners
        noise = self.agent.actions.noise(num_rows * learners.num, seed)
        if learners.num == 1:
            return noise
        inner = noise.shape[1:]
        parts = tf.reshape(noise, [self.config.horizon, learners.num, -1, *inner])
        return tf.reshape(parts[:, learners.index], [num_rows, *inner])

    def _seeds(self, iteration: int) -> list[tuple[int, int]]:
        """Return a seed for the action noise, and a seed for shuffling the rows.

        Each seed consists of two integers, as TensorFlow expects.
        """
        seeds = np.random.SeedSequence(self.config.seed, spawn_key=(iteration,))
        act_0, act_1, shuffle_0, shuffle_1 = map(int, seeds.generate_state(4) >> 1)
        return [(act_0, act_1), (shuffle_0, shuffle_1)]

    def _collect(self, iteration: int) -> Rollout:
        """Return the rollout that was collected during the last update, or a new one.

        If an exception interrupted the collection during the update, raise it here.
        """
        if self._next_rollout is not None:
            future, self._next_rollout = self._next_rollout, None
            return future.result()
        return self.simulation.run(self._seeds(iteration)[0], self._snapshot)

    def _learn(self, rollout: Rollout, after: Counters) -> dict[str, float]:
        """Update the agent, unless the rollout has no valid step; return metrics.

        `after` contains the counters after this iteration.
        """
        counters = self.counters
        if after.steps == counters.steps:
            return {}
        metrics = self.algorithm.learn(
            rollout,
            progress=counters.steps / self.config.planned_steps,
            seed=self._seeds(counters.iteration)[1],
        )
        return self._numbers("learn", metrics)

    def statistics(self) -> dict[str, float]:
        """Return the algorithm's metrics of its state after the last iteration.

        They are computed once per iteration, because an algorithm may reset them.
        """
        if self._statistics is None:
            self._statistics = self._numbers("statistics", self.algorithm.statistics())
        return self._statistics

    def _numbers(self, method: str, metrics: Any) -> dict[str, float]:
        """Return the metrics of a method, without those of the training loop.

        The names "steps" and "evaluation_..." are reserved for the training loop.
        """
        try:
            numbers = {name: float(value) for name, value in metrics.items()}
            check_metric_names(numbers)
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"algorithm {self.config.algorithm}: expected `{method}` to return a "
                f"dict from metric names to numbers, got {metrics!r:.200}."
            ) from error
        return {
            name: number
            for name, number in numbers.items()
            if name != "steps" and not name.startswith("evaluation_")
        }

    def _learn_and_collect(self, rollout: Rollout, after: Counters) -> dict[str, float]:
        """Update the agent in another thread while collecting the next rollout.

        If the collection fails, the next `_collect` raises the exception, so that this
        iteration can still be completed and saved.
        """
        acting, newest = self._snapshot, self.agent.snapshot()
        tf.nest.map_structure(lambda old, new: old.assign(new), acting, newest)
        # If the collection has failed, a stop must not interrupt the update.
        with contextlib.suppress(TrainingStopped), ThreadPoolExecutor(1) as pool:
            update = pool.submit(self._learn, rollout, after)
            if not self.config.is_finished_after(after.steps):
                seed, _ = self._seeds(after.iteration)
                self._next_rollout = Future()
                try:
                    self._next_rollout.set_result(self.simulation.run(seed, acting))
                except Exception as error:
                    self._next_rollout.set_exception(error)
        return update.result()

    def iterate(self) -> dict[str, float]:
        """Collect one rollout, update the agent, and return the metrics."""
        config, counters, learners = self.config, self.counters, self.learners
        started_at = time.perf_counter()
        self.rollout = rollout = self._collect(counters.iteration)
        infos = self.simulation.infos
        episodes = self.tracker.add(rollout, infos)
        newest = episodes[-_RECENT_EPISODES // learners.num :]
        lost = step_arrays(rollout).lost
        is_masking = config.nonfinite == "mask"
        num_masked = num_non_finite(rollout, infos) if is_masking else 0
        counts = int(rollout.valid.sum()), int(lost.sum()), num_masked
        gathered = learners.gather((counts, newest))
        collected_at = time.perf_counter()
        num_valid, num_lost, num_masked = map(
            sum, zip(*[counts for counts, _ in gathered], strict=True)
        )
        after = Counters(counters.iteration + 1, counters.steps + num_valid)
        for _, episodes in gathered:
            self.recent.extend(Episode(*episode) for episode in episodes)
        callback_metrics = self.before_update(self)  # may change rollout.reward
        learn = self._learn_and_collect if config.overlap else self._learn
        learn_metrics = learn(rollout, after)
        # Update the statistics after learning, because the log-probabilities in the
        # rollout depend on the previous statistics.
        observation = tf.nest.map_structure(
            lambda leaf: leaf[:-1].reshape(-1, *leaf.shape[2:]), rollout.observation
        )  # [T + 1, B, ...] -> [T * B, ...]
        self.agent.preprocess.update(observation, rollout.valid.reshape(-1), learners)
        self.counters, self._statistics = after, None
        finished_at = time.perf_counter()
        return {
            **callback_metrics,
            **learn_metrics,
            "iteration": self.counters.iteration,
            "mean_return": self.mean_return,
            "mean_length": _mean([episode.length for episode in self.recent]),
            "invalid_steps": float(config.steps_per_iteration - num_valid),
            "lost_episodes": float(num_lost),
            **({"nonfinite_episodes": num_masked} if is_masking else {}),
            "valid_fraction": num_valid / config.steps_per_iteration,
            "rollout_seconds": collected_at - started_at,
            "update_seconds": finished_at - collected_at,
            **info_means(self.recent),
        }

    @property
    def is_finished(self) -> bool:
        """Whether the run has completed its steps, or a callback has stopped it."""
        return self.is_stopped or self.config.is_finished_after(self.counters.steps)

    @property
    def mean_return(self) -> float:
        """Mean return of the last 100 episodes; NaN before the first one ends."""
        return _mean([episode.total_reward for episode in self.recent])


@np.errstate(over="ignore", invalid="ignore")  # sums of very large returns
def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
