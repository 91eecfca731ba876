"""What tests of runs share: a small config, makers of envs, updates, saved runs."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import tensorflow as tf

from envserve.client import BatchEnv
from envserve.slab import Status
from ppo.agent.agent import Agent
from ppo.agent.normalize import ReturnScale
from ppo.cli.app import PROGRAM
from ppo.cli.progress import Screen
from ppo.config import Config
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.learning.update import Updater
from ppo.rollout import Rollout
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import Counters, training_state
from ppo.run_folder.folder import RunFolder
from ppo.simulate import Simulation
from ppo.train import TrainResult, train
from tests.command_line import invoke
from tests.ppo.fakes import CountingBatchEnv, as_batch_env

#: Four iterations of 16 steps.
SMALL = Config(
    env_name="fake",
    num_envs=2,
    horizon=8,
    total_steps=64,
    epochs=1,
    minibatch_size=8,
    policy_layers=(4,),
    value_layers=(4,),
    curve_episodes=3,
    evaluation_episodes=3,
    checkpoint_every=32,
    jit_compile=False,  # compiling takes longer than these few updates
)


def ppo(*arguments: object) -> tuple[int, str, str]:
    """Run the command in this process; returns exit code, output and errors.

    It may choose neither threads nor a renderer for the whole suite. However long it
    takes, it has no line every ten seconds.
    """
    with (
        # Once TensorFlow has computed something, it refuses another number of threads.
        mock.patch("ppo.cli.options.start_tensorflow"),
        mock.patch("ppo.cli.train.start_tensorflow"),
        mock.patch("envserve.worker.rendering.headless_variables", return_value={}),
        mock.patch.dict(Screen.__init__.__kwdefaults__, seconds_between_lines=1e6),
    ):
        return invoke(PROGRAM, list(map(str, arguments)))


def run(
    folder: Path,
    config: Config = SMALL,
    maker: "Maker | None" = None,
    *,
    resume: bool = False,
    **named: Any,
) -> TrainResult:
    run_folder = RunFolder(folder) if resume else RunFolder.create(folder, config)
    return train(config, run_folder, maker or Maker(), resume=resume, **named)


def counters(folder: Path) -> Counters:
    return checkpoint.read_counters(folder / "checkpoints")


class Maker:
    """Makes fakes, and keeps what it was asked for.

    Args:
        make: maps a number of envs to a fake.
        evaluation: maps how many fakes were made before to one for an evaluation: all
            but the first, if this is given.
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


class Learner:
    """An agent, its update and a rollout, which can go back to how they began.

    Compiling an update takes seconds, so tests share learners.
    """

    def __init__(self, agent: Agent, config: Config, rollout: Rollout) -> None:
        self.agent = agent
        self.rollout = rollout
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
        """Go back to the start, then update once."""
        self.rewind()
        rollout = self.rollout if rollout is None else rollout
        return self.updater.update(rollout, **{"seed": (3, 4), **named})

    def outcome(
        self, rollout: Rollout | None = None, **named: Any
    ) -> tuple[dict[str, float], np.ndarray]:
        """Do the same; returns the parameters, too."""
        metrics = self.update(rollout, **named)
        return metrics, parameters(self.agent)


@contextlib.contextmanager
def traced_already(function: str) -> Iterator[None]:
    """Fail if an agent's function is traced: in a compiled graph none is called."""
    error = AssertionError("expected the graph that there is; got another one traced")
    with mock.patch.object(Agent, function, side_effect=error):
        yield


def copy(rollout: Rollout) -> Rollout:
    """Return a rollout that stays as it is when the next one is collected."""
    return Rollout(*tf.nest.map_structure(np.copy, tuple(rollout)))


def rollout_of(num_steps: int, num_envs: int = 1, **rows: Any) -> Rollout:
    """Return a rollout of valid rows of zeros, but for the fields that are given."""
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
    """Replace all that is made up, and observations that nobody has taken in.

    One on which an invalid row acted is real if a valid step led there within an
    episode, since the row before bootstraps from it; or if it is late, and remembered.
    """
    valid, done = rollout.valid, rollout.done
    led_to = np.zeros_like(valid)
    led_to[1:] = (valid & ~done)[:-1]
    unseen = ~valid & ~led_to & (rollout.status != Status.LATE)
    filled = copy(rollout)
    places = [
        (rows, ~valid) for rows in (filled.action, filled.log_prob, filled.reward)
    ]
    places += [
        (leaf, ~(done & valid)) for leaf in tf.nest.flatten(filled.final_observation)
    ]
    places += [(leaf[:-1], unseen) for leaf in tf.nest.flatten(filled.observation)]
    for rows, where in places:
        rows[where] = np.array(garbage).astype(rows.dtype)
    return filled


def acting(
    agent: Agent, env: InGraphBatchEnv, horizon: int, **named: Any
) -> Simulation:
    """Return the simulation that a training of this agent would have."""
    return Simulation(
        env,
        agent.act_from,
        horizon,
        snapshot=agent.snapshot,
        log_prob=agent.log_prob,
        noise=agent.actions.noise,
        state_sizes=agent.state_sizes,
        **named,
    )


def parameters(agent: Agent) -> np.ndarray:
    """Return all that an agent learns, as one vector."""
    return np.concatenate([v.numpy().ravel() for v in agent.trainable_variables])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def save_run(folder: Path, config: Config, iterations: tuple[int, ...] = (1,)) -> None:
    """Make a run with checkpoints of agents that were never trained.

    They are of 100 steps per iteration; each acts in its way.
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
            training_state(
                agent,
                Updater(agent, config),
                ReturnScale(config.num_envs, config.discount),
            ),
            keep=len(iterations),
        )
    env.close()
