"""Cases around a rollout: as a whole, its policy, its lane, and a loop in Python.

All measure microseconds per batch step. TensorFlow is loaded by the process of a case,
when it is opened.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from envserve.bench.case_process import Measure, Skip
from envserve.bench.load import Load
from envserve.bench.ours import our_batch
from envserve.client import BatchEnv
from ppo.commands.options import start_tensorflow
from ppo.config import Config
from ppo.errors import BadInputError

__all__ = [
    "MICROSECONDS",
    "RolloutLoad",
    "choosing",
    "load_tensorflow",
    "looping_in_python",
    "repeating",
    "simulating",
    "stepping_lane",
]

MICROSECONDS = "us_per_batch_step"


@dataclass(frozen=True)
class RolloutLoad:
    """The work of a case.

    Attributes:
        load: which envs, and how long a measurement lasts.
        horizon: batch steps per rollout.
        binds: where servers are to listen; with none, the envs are this process's.
    """

    load: Load
    horizon: int
    binds: tuple[str, ...] = ()

    def config(self) -> Config:
        """Return settings with the default networks."""
        size = self.load.num_envs * self.horizon
        return Config(
            env_name=self.load.env_name,
            num_envs=self.load.num_envs,
            horizon=self.horizon,
            minibatch_size=size,
            total_steps=size,
        )


def load_tensorflow() -> None:
    """Load TensorFlow as `ppo train` does; raises `Skip` where it is not installed."""
    try:
        start_tensorflow(intra_op_threads=2, inter_op_threads=1)
    except BadInputError as error:
        raise Skip(str(error)) from error


def repeating(run: Callable[[], Any], batch_steps: int, seconds: float) -> Measure:
    """Return a measurement of something that makes so many batch steps."""
    run()

    def measure() -> Mapping[str, float]:
        run()  # others have had their turn meanwhile
        runs, began = 0, time.perf_counter()
        while runs == 0 or time.perf_counter() - began < seconds:
            run()
            runs += 1
        elapsed = time.perf_counter() - began
        return {MICROSECONDS: 1e6 * elapsed / (runs * batch_steps)}

    return measure


@contextlib.contextmanager
def simulating(work: RolloutLoad) -> Iterator[Measure]:
    """Collect rollouts with the agent of a training."""
    load_tensorflow()
    from ppo.in_graph_batch_env import InGraphBatchEnv
    from ppo.simulate import Simulation

    with our_batch(work.load, work.binds) as batch:
        agent = _agent(work, batch)
        simulation = Simulation(
            InGraphBatchEnv(batch),
            agent.act_on_noise,
            work.horizon,
            draw_noise=agent.draw_noise,
        )
        seeds = itertools.count()
        yield repeating(
            lambda: simulation.run((0, next(seeds))), work.horizon, work.load.seconds
        )


@contextlib.contextmanager
def choosing(work: RolloutLoad) -> Iterator[Measure]:
    """Run the policy alone, in a loop of the graph."""
    load_tensorflow()
    import tensorflow as tf

    with our_batch(work.load, work.binds) as batch:
        act = _env_actions(work, batch)
        first = tf.nest.map_structure(tf.constant, batch.reset())
        loop = tf.function(lambda seed: _policy_loop(act, first, seed, work.horizon))
        seeds = itertools.count()
        yield repeating(
            lambda: loop(tf.constant((0, next(seeds)), tf.int32)),
            work.horizon,
            work.load.seconds,
        )


@contextlib.contextmanager
def stepping_lane(work: RolloutLoad) -> Iterator[Measure]:
    """Step the batch with actions that are there; tells the processor's time as well.

    The second number, `thread_us`, is what the stepping thread has computed.
    """
    with our_batch(work.load, work.binds) as batch:
        actions = itertools.cycle(work.load.actions())
        out = batch.step(next(actions))

        computed: list[float] = []

        def run() -> None:
            began = time.thread_time()
            for _ in range(work.horizon):
                batch.step(next(actions), out=out)
            computed.append((time.thread_time() - began) / work.horizon)

        lane = repeating(run, work.horizon, work.load.seconds)

        def measure() -> Mapping[str, float]:
            computed.clear()
            return {**lane(), "thread_us": 1e6 * sum(computed) / len(computed)}

        yield measure


@contextlib.contextmanager
def looping_in_python(work: RolloutLoad, jit_compile: bool) -> Iterator[Measure]:
    """Alternate a compiled policy and the batch from Python; keeps what they give."""
    load_tensorflow()
    import tensorflow as tf

    with our_batch(work.load, work.binds) as batch:
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

        yield repeating(run, work.horizon, work.load.seconds)


def _agent(work: RolloutLoad, batch: BatchEnv) -> Any:
    from ppo.agent import Agent

    return Agent(batch.observation_space, batch.action_space, work.config())


def _env_actions(work: RolloutLoad, batch: BatchEnv) -> Callable[..., Any]:
    """Return the policy with what makes env actions of its actions."""
    from ppo.in_graph_batch_env import InGraphBatchEnv

    agent, graph_env = _agent(work, batch), InGraphBatchEnv(batch)

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
        # Nothing may look as if it were the same in each step, or it is computed once.
        change = chosen[2][0] > 1e30
        observation = tf.nest.map_structure(
            lambda leaf: leaf + tf.cast(change, leaf.dtype), observation
        )
        return step + 1, observation, chosen

    begin = (tf.constant(0), first, act(first, seed))
    return tf.while_loop(
        lambda step, *_: step < horizon, body, begin, parallel_iterations=1
    )[2]
