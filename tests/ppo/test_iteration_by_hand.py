"""Three iterations of training equal their recomputation in float64 NumPy.

Only the rollouts and the order of rows in minibatches come from the trainer.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from ppo.algorithms.ppo.ppo import PPO
from ppo.config import Config
from ppo.environments import env_maker
from ppo.run_folder.checkpoint import Counters
from ppo.training_run import TrainingRun
from tests.ppo import unsteady_env
from tests.ppo.iteration_in_numpy import Array, Reference

pytestmark = pytest.mark.usefixtures("one_launcher")

NUM_ITERATIONS = 3
CONFIG = Config(
    env_name=f"{unsteady_env.__file__}:Unsteady",
    env_kwargs={"kind": "box"},
    num_envs=4,
    horizon=16,
    total_steps=1_000,
    epochs=4,
    minibatch_size=16,
    learning_rate=3e-3,
    max_gradient_norm=0.1,  # clips the gradients of both networks
    policy_layers=(8,),
    value_layers=(8,),
    jit_compile=False,
    padding_after_seconds=60.0,  # no padding, even if a worker is slow
)
#: The settings of each case that differ from `CONFIG`.
CASES: dict[str, dict[str, Any]] = {
    "gaussian": {},
    # One minibatch, because XLA shuffles with other random numbers.
    "gaussian_with_xla": {"jit_compile": True, "minibatch_size": 64},
    "squashed_gaussian": {
        "action_distribution": "squashed_gaussian",
        "state_dependent_std": True,
        "entropy_coefficient": 0.01,
        "normalize_advantages": True,
        "observation_clip": 1.5,
    },
    "penalty": {
        "objective": "penalty",
        "kl_target": 1e-3,
        "entropy_coefficient": 0.01,
        "value_clip_range": 0.05,
    },
    "later_epoch_undone": {"max_kl": 0.012, "epochs": 8},
    "first_epoch_undone": {"learning_rate": 0.1},
    "discrete": {"env_kwargs": {"kind": "discrete"}, "adam_epsilon": 1e-3},
    "multi_discrete": {
        "env_kwargs": {"kind": "multi_discrete"},
        "recompute_advantages": False,
        "reward_clip": 1.0,
    },
    "bits": {
        "env_kwargs": {"kind": "bits"},
        "clip_range": 0.05,
        "decay_clip_range": True,
        "entropy_coefficient": 0.01,
        "decay_entropy_coefficient": True,
    },
}
#: Largest errors of parameters, relative to the largest change of one in an iteration,
#: and of other numbers. A high learning rate amplifies rounding errors.
PRECISION = dict.fromkeys(CASES, 1e-4) | {"first_epoch_undone": 5e-4}


@contextlib.contextmanager
def recorded_seeds(run: TrainingRun) -> Iterator[list[Any]]:
    """Record the seeds of the updates of a run."""
    seeds: list[Any] = []
    learn = run.algorithm.learn

    def recording(*args: Any, seed: Any, **named: Any) -> Any:
        seeds.append(seed)
        return learn(*args, seed=seed, **named)

    with mock.patch.object(run.algorithm, "learn", recording):
        yield seeds


def order_of_rows(seed: tuple[int, int]) -> Callable[[int], Array]:
    """Return a function from the number of an epoch to the order of its rows."""

    def order(epoch: int) -> Array:
        of_epoch = tf.random.experimental.stateless_fold_in(tf.constant(seed), epoch)
        uniform = tf.random.stateless_uniform([CONFIG.steps_per_iteration], of_epoch)
        return tf.argsort(uniform).numpy()

    return order


def arrays_of(variables: list[Any]) -> list[Array]:
    return [variable.numpy() for variable in variables]


def largest_difference(left: list[Array], right: list[Array]) -> float:
    pairs = zip(left, right, strict=True)
    return max(float(np.abs(first - second).max()) for first, second in pairs)


@pytest.mark.parametrize("name", CASES)
def test_iterations_equal_their_recomputation(name: str) -> None:
    config, precision = CONFIG.replace(**CASES[name]), PRECISION[name]
    make_env = env_maker(config, num_workers=1)
    with make_env(num_envs=config.num_envs, seed=1, is_training=True) as env:
        run = TrainingRun(config, env, Counters(), PPO, lambda: None)
        algorithm, variables = run.algorithm, run.agent.trainable_variables
        assert isinstance(algorithm, PPO)
        num_policy = len(run.agent.policy_variables)
        networks = [variables[:num_policy], variables[num_policy:]]
        policy, value = map(arrays_of, networks)
        spaces = env.observation_space, env.action_space
        reference = Reference(config, *spaces, policy, value)
        epochs_run = []
        for _ in range(NUM_ITERATIONS):
            before = [arrays_of(network) for network in networks]
            with recorded_seeds(run) as seeds:
                metrics = run.iterate() | run.algorithm.statistics()
            rollout = run.rollout
            # Otherwise, a rule for the end of an episode would not be tested.
            ends = rollout.terminated, rollout.truncated & rollout.valid, ~rollout.valid
            assert all(rows.any() for rows in ends)
            expected = reference.iterate(rollout, order_of_rows(seeds[0]))

            assert metrics.pop("ratio_deviation") < 1e-5
            assert expected.pop("ratio_deviation") < 1e-4  # of slightly other weights
            del metrics["rollout_seconds"], metrics["update_seconds"]
            assert metrics == pytest.approx(expected, rel=precision, abs=1e-5)
            epochs_run.append(metrics["epochs_run"])
            after = [arrays_of(network) for network in networks]
            moves = list(map(largest_difference, before, after))
            assert moves[1] > 5e-3
            assert moves[0] > 5e-3 or not metrics["epochs_run"]
            for network, move in enumerate(moves):
                error = largest_difference(after[network], reference.networks[network])
                assert error < 1e-6 + precision * move
            for kind, moments in (
                ("momentum", reference.first_moments),
                ("velocity", reference.second_moments),
            ):
                slots = algorithm.updater.optimizer.variables
                got = arrays_of([slot for slot in slots if kind in slot.path])
                wanted = moments[0] + moments[1]
                size = largest_difference(got, [0.0 * array for array in got])
                assert largest_difference(got, wanted) < precision * size
        least = {"first_epoch_undone": 0, "later_epoch_undone": 3}
        assert min(epochs_run) == least.get(name, config.epochs)
