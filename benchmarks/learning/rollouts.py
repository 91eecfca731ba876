"""Cases that measure a complete rollout, or its policy alone.

The cases measure microseconds per batch step. The process of a case loads TensorFlow
when the case is opened.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Skip
from envserve.bench.cases import batch_env
from envserve.bench.interleaved import MICROSECONDS, Measure
from envserve.bench.workload import Workload
from envserve.client import BatchEnv
from ppo.cli.options import start_tensorflow
from ppo.config import Config
from ppo.errors import BadInputError


@dataclass(frozen=True)
class RolloutLoad:
    """The envs and the rollout length of a case.

    Attributes:
      load: The envs, and the duration of a measurement.
      horizon: Batch steps per rollout.
      binds: Addresses of the servers; if empty, the envs run in-process.
    """

    load: Workload
    horizon: int
    binds: tuple[str, ...] = ()

    def agent(self, batch: BatchEnv) -> Any:
        """Return an agent with the default networks."""
        from ppo.agent.agent import Agent

        size = self.load.num_envs * self.horizon
        config = Config(
            env_name=self.load.env_name,
            num_envs=self.load.num_envs,
            horizon=self.horizon,
            minibatch_size=size,
            total_steps=size,
        )
        return Agent(batch.observation_space, batch.action_space, config)

    def repeating(self, run: Callable[[], Any]) -> Measure:
        """Return a function that measures `run`, which must collect one rollout."""
        return repeating(run, self.horizon, self.load.seconds)


def load_tensorflow() -> None:
    """Load TensorFlow as `ppo train` does; raise `Skip` if it is not installed."""
    try:
        start_tensorflow(intra_op_threads=2, inter_op_threads=1)
    except BadInputError as error:
        raise Skip(str(error)) from error


def repeating(run: Callable[[], Any], batch_steps: int, seconds: float) -> Measure:
    """Return a function that calls `run` for some seconds and measures its duration.

    Args:
      run: The function to measure.
      batch_steps: Number of batch steps in each call to `run`.
      seconds: Minimum duration of a measurement.
    """
    run()

    def measure() -> Mapping[str, float]:
        run()  # refill the CPU caches, which other cases have used
        num_runs, started = 0, time.perf_counter()
        while num_runs == 0 or time.perf_counter() - started < seconds:
            run()
            num_runs += 1
        elapsed = time.perf_counter() - started
        return {MICROSECONDS: 1e6 * elapsed / (num_runs * batch_steps)}

    return measure


def rollouts(
    batch: BatchEnv, work: RolloutLoad, *, in_numpy: bool = True, act_on: float = 1.0
) -> Any:
    """Return a `Simulation` of an agent with the default networks.

    Args:
      batch: The envs.
      work: Provides the horizon.
      in_numpy: Whether the policy runs in NumPy, or in TensorFlow.
      act_on: See `Simulation`.
    """
    load_tensorflow()
    from ppo.in_graph_batch_env import InGraphBatchEnv
    from ppo.simulate import Simulation

    agent = work.agent(batch)
    return Simulation(
        InGraphBatchEnv(batch),
        agent.act_from,
        work.horizon,
        snapshot=agent.snapshot,
        in_numpy=agent.in_numpy if in_numpy else lambda *_: None,
        log_prob=agent.log_prob,
        noise=agent.actions.noise,
        act_on=act_on,
    )


@contextlib.contextmanager
def simulating(work: RolloutLoad, in_numpy: bool = True) -> Iterator[Measure]:
    """Measure rollouts of an agent with the default networks."""
    with batch_env(work.load, work.binds) as batch:
        simulation = rollouts(batch, work, in_numpy=in_numpy)
        seeds = itertools.count()
        yield work.repeating(lambda: simulation.run((0, next(seeds))))


@contextlib.contextmanager
def choosing(work: RolloutLoad) -> Iterator[Measure]:
    """Measure the policy alone, in NumPy, on the first observation."""
    load_tensorflow()
    import tensorflow as tf

    with batch_env(work.load, work.binds) as batch:
        agent = work.agent(batch)
        act = agent.in_numpy(agent.snapshot(), work.load.num_envs)
        assert act is not None
        leaves = tf.nest.flatten(batch.reset())
        noise = agent.actions.noise(work.load.num_envs, tf.constant((0, 0))).numpy()

        def run() -> None:
            for _ in range(work.horizon):
                act(leaves, noise)

        yield work.repeating(run)
