"""Rollout cases: a complete rollout, its policy alone, and a loop in Python.

All measure microseconds per batch step. The process of a case loads TensorFlow when the
case is opened.
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
    """The work of a case.

    Attributes:
        load: the envs, and the duration of a measurement.
        horizon: batch steps per rollout.
        binds: addresses of the servers; if empty, the envs run in-process.
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
        """Return a measurement of a function that collects one rollout."""
        return repeating(run, self.horizon, self.load.seconds)


def load_tensorflow() -> None:
    """Load TensorFlow as `ppo train` does; raise `Skip` if it is not installed."""
    try:
        start_tensorflow(intra_op_threads=2, inter_op_threads=1)
    except BadInputError as error:
        raise Skip(str(error)) from error


def repeating(run: Callable[[], Any], batch_steps: int, seconds: float) -> Measure:
    """Return a measurement of a function that takes `batch_steps` batch steps."""
    run()

    def measure() -> Mapping[str, float]:
        run()  # refills the caches after other cases
        runs, began = 0, time.perf_counter()
        while runs == 0 or time.perf_counter() - began < seconds:
            run()
            runs += 1
        elapsed = time.perf_counter() - began
        return {MICROSECONDS: 1e6 * elapsed / (runs * batch_steps)}

    return measure


@contextlib.contextmanager
def simulating(work: RolloutLoad) -> Iterator[Measure]:
    """Collect rollouts with a trainer's agent."""
    load_tensorflow()
    from ppo.in_graph_batch_env import InGraphBatchEnv
    from ppo.simulate import Simulation

    with batch_env(work.load, work.binds) as batch:
        agent = work.agent(batch)
        simulation = Simulation(
            InGraphBatchEnv(batch),
            agent.act_from,
            work.horizon,
            snapshot=agent.snapshot,
            log_prob=agent.log_prob,
            noise=agent.actions.noise,
        )
        seeds = itertools.count()
        yield work.repeating(lambda: simulation.run((0, next(seeds))))


@contextlib.contextmanager
def choosing(work: RolloutLoad) -> Iterator[Measure]:
    """Run the policy alone, in a loop within a graph."""
    load_tensorflow()
    import tensorflow as tf

    with batch_env(work.load, work.binds) as batch:
        act = _env_actions(work, batch)
        first = tf.nest.map_structure(tf.constant, batch.reset())
        loop = tf.function(lambda seed: _policy_loop(act, first, seed, work.horizon))
        seeds = itertools.count()
        yield work.repeating(lambda: loop(tf.constant((0, next(seeds)), tf.int32)))


@contextlib.contextmanager
def looping_in_python(work: RolloutLoad, jit_compile: bool) -> Iterator[Measure]:
    """Call a compiled policy and the batch alternately, and store the results."""
    load_tensorflow()
    import tensorflow as tf

    with batch_env(work.load, work.binds) as batch:
        act = tf.function(_env_actions(work, batch), jit_compile=jit_compile)
        observation = batch.reset()
        steps = itertools.count()

        def run() -> list[Any]:
            nonlocal observation
            rollout = []
            for _ in range(work.horizon):
                seed = tf.constant((0, next(steps)), tf.int32)
                env_action, action, log_prob = act(observation, seed)
                result = batch.step(env_action.numpy())
                rollout.append((observation, action.numpy(), log_prob.numpy(), result))
                observation = result.observation
            return rollout

        yield work.repeating(run)


def _env_actions(work: RolloutLoad, batch: BatchEnv) -> Callable[..., Any]:
    """Return the policy, including the conversion to env actions."""
    from ppo.in_graph_batch_env import InGraphBatchEnv

    agent, graph_env = work.agent(batch), InGraphBatchEnv(batch)

    def act(observation: Any, seed: Any) -> tuple[Any, Any, Any]:
        action, log_prob = agent.act(observation, seed)
        return graph_env.to_env_action(action), action, log_prob

    return act


def _policy_loop(act: Callable[..., Any], first: Any, seed: Any, horizon: int) -> Any:
    import tensorflow as tf

    def body(step: Any, observation: Any, last: Any) -> tuple[Any, Any, Any]:
        del last
        step_seed = tf.random.experimental.stateless_fold_in(seed, step)
        chosen = act(observation, step_seed)
        # The input must seem to change, or TensorFlow computes the policy only once.
        change = chosen[2][0] > 1e30
        observation = tf.nest.map_structure(
            lambda leaf: leaf + tf.cast(change, leaf.dtype), observation
        )
        return step + 1, observation, chosen

    begin = (tf.constant(0), first, act(first, seed))
    return tf.while_loop(
        lambda step, *_: step < horizon, body, begin, parallel_iterations=1
    )[2]
