"""Helpers for tests of runs: a small config, fake envs, updates, saved runs."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import keras
import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from envserve.pool.pool import Pool
from envserve.settings import PoolSettings
from envserve.slab import Status
from ppo.agent.agent import Agent
from ppo.algorithms.ppo.ppo import PPO
from ppo.algorithms.ppo.update import Updater
from ppo.cli.app import PROGRAM
from ppo.cli.compilation_cache import enable_compilation_cache
from ppo.cli.progress import Screen
from ppo.config import Config
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.rollout import Rollout
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import Counters, training_state
from ppo.run_folder.folder import RunFolder
from ppo.simulate import Simulation
from ppo.train import TrainResult, train
from tests.command_line import invoke
from tests.ppo.fakes import CountingBatchEnv, as_batch_env

# Compilation takes seconds, so tests share compiled code, as runs of `ppo train` do.
enable_compilation_cache(tf.__version__)
# To shorten the tracebacks of errors takes time in each call of TensorFlow and Keras.
tf.debugging.disable_traceback_filtering()
keras.config.disable_traceback_filtering()

#: Four iterations of 16 steps, each with one gradient step.
SMALL = Config(
    env_name="fake",
    num_envs=2,
    horizon=8,
    total_steps=64,
    epochs=1,
    minibatch_size=16,
    policy_layers=(4,),
    value_layers=(4,),
    curve_episodes=3,
    evaluation_episodes=3,
    checkpoint_every=32,
    jit_compile=False,  # compilation takes longer than these few updates
)


def ppo(*arguments: object) -> tuple[int, str, str]:
    """Run the command in this process, and return its exit code, stdout and stderr.

    The command must not change TensorFlow's threads or the renderer for other tests, or
    print a progress line every ten seconds.
    """
    with (
        # TensorFlow rejects changes to the number of threads after its first operation.
        mock.patch("ppo.cli.options.start_tensorflow"),
        mock.patch("ppo.cli.train.start_tensorflow"),
        mock.patch("envserve.worker.rendering.headless_variables", return_value={}),
        mock.patch.dict(Screen.__init__.__kwdefaults__, seconds_between_lines=1e6),
    ):
        return invoke(PROGRAM, list(map(str, arguments)))


@contextlib.contextmanager
def eagerly(is_eager: bool = True) -> Iterator[None]:
    """Run functions without tracing, which takes longer than a few small updates.

    Has no effect with `is_eager=False`.
    """
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(is_eager or before)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def run(
    folder: Path,
    config: Config = SMALL,
    maker: "Maker | None" = None,
    *,
    resume: bool = False,
    in_graphs: bool = False,
    **named: Any,
) -> TrainResult:
    """Start or resume a run, eagerly unless it is to use graphs."""
    run_folder = RunFolder(folder) if resume else RunFolder.create(folder, config)
    with eagerly(not in_graphs):
        return train(config, run_folder, maker or Maker(), resume=resume, **named)


def counters(folder: Path) -> Counters:
    return checkpoint.read_counters(folder / "checkpoints")


class Maker:
    """Fake of `MakeEnv` that returns fake batches and records its arguments.

    Args:
      make: Returns a fake, given the number of envs.
      evaluation: Returns a fake for an evaluation, given the number of fakes made
        before. If given, it is used for all calls except the first.
    """

    def __init__(
        self,
        make: Callable[[int], CountingBatchEnv] = lambda num_envs: CountingBatchEnv(
            [3] * num_envs
        ),
        evaluation: Callable[[int], CountingBatchEnv] | None = None,
    ) -> None:
        self.made: list[CountingBatchEnv] = []
        self.asked: list[tuple[int, int]] = []
        self.trained: list[bool] = []
        self._make = make
        self._evaluation = evaluation

    def __call__(
        self, *, num_envs: int, seed: int, is_training: bool = False
    ) -> BatchEnv:
        number = len(self.made)
        self.asked.append((num_envs, seed))
        self.trained.append(is_training)
        if number and self._evaluation is not None:
            assert all(env.is_closed for env in self.made[1:])
            self.made.append(self._evaluation(number))
        else:
            self.made.append(self._make(num_envs))
        return as_batch_env(self.made[-1])

    @property
    def seeds(self) -> list[int]:
        return [seed for _, seed in self.asked]


def eights(num_envs: int) -> CountingBatchEnv:
    """Return envs whose episodes end with each rollout, so stopping interrupts none."""
    return CountingBatchEnv([8] * num_envs)


class Learner:
    """An agent with an updater and a rollout, which can be reset to the initial state.

    Tests share learners, because the compilation of an update takes seconds. If
    `is_eager`, updates are not compiled.
    """

    def __init__(
        self, agent: Agent, config: Config, rollout: Rollout, *, is_eager: bool = False
    ) -> None:
        self.agent = agent
        self.rollout = rollout
        self._is_eager = is_eager
        self.updater = Updater(agent, config)
        schedules = self.updater.trackables["schedules"]
        parts = tf.train.TrackableView(schedules).descendants()
        variables = [
            *agent.trainable_variables,
            *self.updater.optimizer.variables,
            *(part for part in parts if isinstance(part, tf.Variable)),
        ]
        self.start = [(variable, variable.numpy()) for variable in variables]

    def rewind(self) -> None:
        for variable, value in self.start:
            variable.assign(value)

    def update(self, rollout: Rollout | None = None, **named: Any) -> dict[str, float]:
        """Reset to the initial state, update once, and return the metrics."""
        self.rewind()
        return self.update_again(rollout, **named)

    def update_again(
        self, rollout: Rollout | None = None, **named: Any
    ) -> dict[str, float]:
        """Update without a reset, and return the metrics."""
        rollout = self.rollout if rollout is None else rollout
        with eagerly(self._is_eager):
            return self.updater.update(rollout, **{"seed": (3, 4), **named})

    def outcome(
        self, rollout: Rollout | None = None, **named: Any
    ) -> tuple[dict[str, float], np.ndarray]:
        """Reset, update once, and return the metrics and the parameters."""
        metrics = self.update(rollout, **named)
        return metrics, parameters(self.agent)


def two_lanes(env_name: str, num_envs: int, **settings: Any) -> BatchEnv:
    """Return local envs in two lanes; its splits are not contiguous rows."""
    lanes = [
        Pool(
            PoolSettings(
                env_name=env_name,
                num_envs=num_envs // 2,
                num_workers=1,
                num_splits=2,
                seed=3,
                first_env_index=first,
                **settings,
            )
        )
        for first in (0, num_envs // 2)
    ]
    for lane in lanes:
        lane.finish_start(float("inf"))
    return BatchEnv(lanes)


@contextlib.contextmanager
def no_retracing(function: str) -> Iterator[None]:
    """Fail if a method of the agent is called, which happens only during tracing."""
    error = AssertionError(
        "expected the existing graph to be used, but another one was traced"
    )
    with mock.patch.object(Agent, function, side_effect=error):
        yield


def copy(rollout: Rollout) -> Rollout:
    """Return a copy that the next rollout does not overwrite."""
    return Rollout(*tf.nest.map_structure(np.copy, tuple(rollout)))


def rollout_of(num_steps: int, num_envs: int = 1, **rows: Any) -> Rollout:
    """Return a rollout of valid rows, with zeros in all fields except `rows`."""
    shape = (num_steps, num_envs)
    zeros = Rollout(
        observation=np.zeros((num_steps + 1, num_envs, 2)),
        action=np.zeros((*shape, 1), np.float32),
        log_prob=np.zeros(shape, np.float32),
        reward=np.zeros(shape),
        terminated=np.zeros(shape, np.bool_),
        truncated=np.zeros(shape, np.bool_),
        valid=np.ones(shape, np.bool_),
        final_observation=np.zeros((*shape, 2)),
        status=np.zeros(shape, np.uint8),
    )
    return zeros._replace(**rows)


def fill_masked(rollout: Rollout, garbage: float) -> Rollout:
    """Replace all values that must not influence the update with garbage.

    These are the results of invalid rows, final observations within an episode, and
    observations before an invalid row. Two kinds of the latter are kept: those reached
    by a valid step of the same episode, because the preceding row bootstraps from them,
    and those of late rows, because the recurrent core has processed them.
    """
    valid, done = rollout.valid, rollout.done
    is_reached = np.zeros_like(valid)
    is_reached[1:] = (valid & ~done)[:-1]
    is_unused = ~valid & ~is_reached & (rollout.status != Status.LATE)
    filled = copy(rollout)
    targets = [
        (rows, ~valid) for rows in (filled.action, filled.log_prob, filled.reward)
    ]
    targets += [
        (leaf, ~(done & valid)) for leaf in tf.nest.flatten(filled.final_observation)
    ]
    targets += [(leaf[:-1], is_unused) for leaf in tf.nest.flatten(filled.observation)]
    for rows, where in targets:
        rows[where] = np.array(garbage).astype(rows.dtype)
    return filled


def agent_simulation(
    agent: Agent, env: InGraphBatchEnv, horizon: int, **named: Any
) -> Simulation:
    """Return a simulation with this agent, as created by the trainer."""
    return Simulation(
        env,
        agent.act_from,
        horizon,
        snapshot=agent.snapshot,
        in_numpy=agent.in_numpy,
        log_prob=agent.log_prob,
        noise=agent.actions.noise,
        state_sizes=agent.state_sizes,
        **named,
    )


def parameters(agent: Agent) -> np.ndarray:
    """Return all trainable parameters of an agent as one vector."""
    return np.concatenate([v.numpy().ravel() for v in agent.trainable_variables])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def save_run(folder: Path, config: Config, iterations: tuple[int, ...] = (1,)) -> None:
    """Create a run folder with checkpoints of untrained agents.

    Each iteration has 100 steps, and each checkpoint has different weights.
    """
    run_folder = RunFolder.create(folder, config)
    env = gymnasium.make(config.env_name, **config.env_kwargs)
    env.observation_space.seed(0)
    for iteration in iterations:
        seeded = config.replace(seed=config.seed + iteration)
        agent = Agent(env.observation_space, env.action_space, seeded)
        rows = [env.observation_space.sample() for _ in range(9)]
        agent.preprocess.update(
            tf.nest.map_structure(lambda *leaves: np.stack(leaves), *rows),
            tf.ones([9], tf.bool),
        )
        checkpoint.save(
            run_folder.checkpoints,
            Counters(iteration, 100 * iteration),
            training_state(agent, PPO(agent, config).trackables),
            keep=len(iterations),
        )
    env.close()
