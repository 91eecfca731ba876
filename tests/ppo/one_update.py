"""The process of one of two learners: it updates once on its half of a rollout.

`expected` returns the correct result: the update of a single learner on the whole
rollout, with minibatches of the same rows.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from ppo.agent.agent import Agent
from ppo.algorithms.ppo.ppo import PPO
from ppo.config import Config
from ppo.errors import LearnerLostError
from ppo.learners import SINGLE_LEARNER, Learners
from ppo.learning.samples import StepSampler
from ppo.rollout import Rollout
from ppo.run_folder import checkpoint
from ppo.run_folder.checkpoint import training_state
from ppo.simulate import simulate
from tests.ppo.fakes import ACTIONS, BOX, CountingBatchEnv, in_graph
from tests.ppo.runs import SMALL, eagerly, parameters

#: Lost steps. The first learner has more lost steps than the second, so averaging the
#: learners' means would be wrong.
LOST = frozenset({(2, 0), (5, 1), (6, 1), (6, 0), (7, 0)})
#: Enables all computations that involve the rows of several learners.
CONFIG = SMALL.replace(
    num_envs=4,
    total_steps=160,
    epochs=2,
    minibatch_size=8,
    normalize_advantages=True,
    objective="clip_and_penalty",
    learning_rate=0.01,
    kl_target=1e-4,  # the cutoff of the penalty is reached
    max_kl=1e-9,  # the first epoch exceeds it, and is undone
    entropy_coefficient=0.01,
    policy_layers=(8,),
    value_layers=(8,),
    jit_compile=True,
)


def rollout_of_all(agent: Agent) -> Rollout:
    fake = CountingBatchEnv(
        [3, 4, 5, 2], terminates=[True, False, True, False], lost=LOST
    )
    rollout = simulate(in_graph(fake), agent.act, CONFIG.horizon, (1, 2))
    rollout.log_prob[:, 3] += 0.1  # ratios other than 1, in the rows of one learner
    return rollout


def updated(config: Config, learners: Learners) -> Any:
    """Update once on the learner's envs; return metrics, parameters and state."""
    agent = Agent(BOX, ACTIONS, config)
    share = config.per_learner(learners.num)
    rows = slice(learners.index * share.num_envs, (learners.index + 1) * share.num_envs)
    rollout = tf.nest.map_structure(lambda leaf: leaf[:, rows], rollout_of_all(agent))
    algorithm = PPO(agent, share, learners)
    metrics = algorithm.learn(rollout, progress=0.0, seed=(3, 4))
    observation = rollout.observation[:-1].reshape(-1, 2)
    agent.preprocess.update(observation, rollout.valid.reshape(-1), learners)
    state = checkpoint.variables(training_state(agent, algorithm.trackables))
    return metrics, [parameters(agent), *(part.numpy().ravel() for part in state)]


def expected(config: Config) -> Any:
    """Update with a single learner, on the minibatches that two learners would use."""

    horizon, half = config.horizon, config.num_envs // 2

    def minibatches(_: StepSampler, samples: Any, count: int, seed: tf.Tensor) -> Any:
        order = tf.argsort(tf.random.stateless_uniform([horizon * half], seed))

        def shuffled(rows: tf.Tensor) -> tf.Tensor:
            inner = list(rows.shape[1:])
            rows = tf.reshape(rows, [horizon, 2, half, *inner])
            parts = [
                tf.reshape(rows[:, number], [horizon * half, *inner])
                for number in range(2)
            ]
            parts = [
                tf.reshape(tf.gather(part, order), [count, -1, *inner])
                for part in parts
            ]
            return tf.concat(parts, axis=1)

        return tf.nest.map_structure(shuffled, samples)

    with mock.patch.object(StepSampler, "minibatches", minibatches):
        return updated(config, SINGLE_LEARNER)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def main(folder: Path) -> None:
    tf_config = json.loads(os.environ["TF_CONFIG"])
    index = tf_config["task"]["index"]
    learners = Learners(tf_config["cluster"]["worker"], index)
    learners.connect()
    results = {}
    with learners.guard_collectives():
        for max_kl in (0.0, CONFIG.max_kl):
            # Trace and compile only one of the two, which takes most of the time.
            config = CONFIG.replace(max_kl=max_kl)
            with eagerly(max_kl > 0.0):
                metrics, arrays = updated(config, learners)
            results[str(max_kl)] = metrics
            np.savez(folder / f"{max_kl}-{index}.npz", *arrays)
        number = np.float32(0.5) if index else np.int64(7)
        text = "ö" * (3 + 40 * index)
        texts = learners.gather({"from": index, "text": text, "number": number})
        variables = [
            tf.Variable([1.0 + index, 2.0]),
            tf.Variable([index == 0, False]),
            tf.Variable([200 - index], dtype=tf.uint8),
        ]
        learners.broadcast(variables)
        before = num_threads()
        for _ in range(150):
            learners.gather(None)
        results |= {
            "texts": texts,
            "broadcast": [v.numpy().tolist() for v in variables],
        }
        results["new_threads"] = num_threads() - before
        if index == 1:
            # Stay alive without calling collectives until the other learner has timed
            # out.
            (folder / "1.json").write_text(json.dumps(results))
            while not (folder / "0.json").exists():
                time.sleep(0.1)
            sys.exit()
        learners.wait_seconds = 1.0
        try:
            with learners.guard_collectives():
                learners.gather(None)
        except LearnerLostError as error:
            results["lost"] = str(error)
        (folder / "0.json.partial").write_text(json.dumps(results))
        (folder / "0.json.partial").rename(folder / "0.json")
        sys.exit()
