"""Whole rollouts in one graph call.

`simulate` runs T batch steps in one `tf.while_loop`. Each step is, per split, one pass
through the policy and one call into Python, which steps the envs and lets them write
their rows straight into the rollout's arrays `[T, B, ...]`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.errors import EnvError, LocalProtocolError
from ppo.errors import DivergedError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.networks.recurrent import States
from ppo.rollout import Rollout, SplitRows, allocate_rollout

__all__ = ["DrawNoise", "Policy", "Simulation", "simulate"]

Policy = Callable[..., tuple[tf.Tensor, ...]]
"""Maps a raw observation `[n, ...]` and noise `[n, ...]`, or a seed (int32 pair) where
none is drawn, to actions and their log-probabilities `[n]`. One with memory takes its
states `[n, units]` besides, and gives them as they are after that observation."""

DrawNoise = Callable[[int, tf.Tensor], tf.Tensor]
"""Maps a number of rows and a seed (int32 pair) to noise `[rows, ...]`."""


class Simulation:
    """Envs, a policy and the arrays for one rollout; `run` fills them again and again.

    Where the batch has several splits, one split's envs step while the policy thinks
    about another's rows; it then sees `[n, ...]`, the rows of one split.

    Args:
        env: the envs; they are reset when the first rollout starts, and each further
            rollout goes on where the last one ended.
        policy: gives actions; traced into the loop's graph, once per split.
        horizon: T, batch steps per rollout.
        on_step: called after every batch step; what it raises ends the rollout.
        draw_noise: draws what the policy needs for so many rows, given a seed. It is
            called once per rollout, so that a row's noise does not depend on splits,
            and the policy gets its rows of it. By default the policy gets a seed.
        state_sizes: units of each memory of the policy. Their states are zero where an
            episode begins, and go on from rollout to rollout.
        sequence_length: batch steps between the states that the rollout tells; divides
            the horizon, which is the default.
    """

    def __init__(
        self,
        env: InGraphBatchEnv,
        policy: Policy,
        horizon: int,
        on_step: Callable[[], None] = lambda: None,
        *,
        draw_noise: DrawNoise | None = None,
        state_sizes: Sequence[int] = (),
        sequence_length: int = 0,
    ) -> None:
        self._env = env
        self._policy = policy
        self._horizon = horizon
        self._on_step = on_step
        self._draw_noise = draw_noise
        self._sequence_length = sequence_length or horizon
        self._rollout = allocate_rollout(
            env, horizon, state_sizes, horizon // self._sequence_length
        )
        self._splits = [
            SplitRows(self._rollout, env_indices, horizon)
            for env_indices in env.env.splits
        ]
        self._state_sizes = tuple(state_sizes)
        self._states: list[States] = []  # by split, after the last rollout
        self._answer_spec = [env.observation_spec]
        if state_sizes:
            rollout = self._rollout
            flags = (rollout.terminated, rollout.truncated, rollout.status)
            self._answer_spec += [tf.TensorSpec(f.shape[1:], f.dtype) for f in flags]
        self._loop = tf.function(self._steps)
        self._is_started = False

    def run(self, seed: tuple[int, int]) -> Rollout:
        """Collect a rollout.

        Args:
            seed: the same pair gives the same noise; use each once.

        Returns:
            The rollout. Its arrays are overwritten by the next call.

        Raises:
            EnvDataError: a reward, or an observation that counts, is not finite.
            DivergedError: a log-probability is not finite.
            envserve.errors.EnvserveError: whatever the envs raise.
        """
        with self._env.original_errors():
            if self._is_started:
                states = [
                    states.follow(*split.ends(self._horizon - 1))
                    for split, states in zip(self._splits, self._states, strict=True)
                ]
                tf.nest.map_structure(
                    lambda rows: np.copyto(rows[0], rows[-1]), self._rollout.observation
                )
            else:
                states = [
                    States.zero(len(split.env_indices), self._state_sizes)
                    for split in self._splits
                ]
                self._start()
            self._is_started = False  # unless all goes well
            first = [
                tf.nest.map_structure(tf.constant, split.observation(0))
                for split in self._splits
            ]
            # In this thread: to hand each operation to others, while workers have the
            # cores, costs more than the operations do.
            with tf.experimental.function_executor_type("SINGLE_THREADED_EXECUTOR"):
                _, self._states, stored = self._loop(
                    first, states, tf.constant(seed, tf.int32)
                )
            for split in self._splits[1:]:
                self._receive(split, self._horizon - 1)
            for split, split_states in zip(self._splits, stored, strict=True):
                split.store_states(split_states)
            self._is_started = True
        return self._rollout

    def restart(self) -> None:
        """Reset all envs when the next rollout starts, which then is a first one."""
        self._is_started = False

    def _start(self) -> None:
        """Reset all envs."""
        batch = self._env.env
        while len(self._splits) > 1 and (num_out := batch.num_out):
            try:
                batch.recv(num_out)  # sent in a rollout that was cut short
            except (EnvError, LocalProtocolError):
                # Of that rollout; what comes next is a reset.
                if batch.num_out == num_out:
                    raise
        tf.nest.map_structure(
            lambda rows, first: np.copyto(rows[0], first),
            self._rollout.observation,
            self._env.reset(),
        )

    def _steps(self, first: list[Any], states: list[States], seed: tf.Tensor) -> Any:
        """Run the loop; returns T and, by split, last states and those to be stored."""
        draws = self._draw(seed)
        length = self._sequence_length
        stored = [
            split_states.arrays(self._horizon // length) for split_states in states
        ]

        def body(
            step: tf.Tensor, observations: Any, states: Any, stored: Any
        ) -> tuple[tf.Tensor, Any, Any, Any]:
            observations, states, stored = map(list, (observations, states, stored))
            for index, draw_by_step in enumerate(draws):
                draw = tf.gather(draw_by_step, step)
                state = states[index].after
                action, log_prob, *after = self._policy(
                    observations[index], draw, *state
                )
                states[index] = States(state, tuple(after))
                stored[index] = states[index].store_each(length, step, stored[index])
                following = (index + 1) % len(self._splits)
                leaves = self._env.host_call(
                    functools.partial(self._exchange, index, following),
                    [step, self._env.to_env_action(action), action, log_prob],
                    self._splits[following].specs(self._answer_spec),
                )
                if state:
                    states[following] = states[following].follow(*leaves[-3:])
                    leaves = leaves[:-3]
                observations[following] = tf.nest.pack_sequence_as(
                    observations[following], leaves
                )
            return step + 1, observations, states, stored

        step, _, states, stored = tf.while_loop(
            lambda step, *_: step < self._horizon,
            body,
            (tf.constant(0), first, states, stored),
            parallel_iterations=1,
        )
        stored = tf.nest.map_structure(lambda array: array.stack()[:-1], stored)
        return step, states, stored

    # All of it before the loop: drawing takes more operations than acting does.
    def _draw(self, seed: tf.Tensor) -> list[tf.Tensor]:
        """Return for each split noise `[T, n, ...]`, or a seed per step `[T, 2]`."""
        horizon, num_envs = self._horizon, self._env.num_envs
        if self._draw_noise is None:
            shape = [len(self._splits), horizon, 2]
            seeds = tf.random.stateless_uniform(
                shape, seed, minval=None, maxval=None, dtype=tf.int32
            )
            return tf.unstack(seeds)
        noise = self._draw_noise(horizon * num_envs, seed)
        noise = tf.reshape(noise, [horizon, num_envs, *noise.shape[1:]])
        return [tf.gather(noise, split.env_indices, axis=1) for split in self._splits]

    def _exchange(
        self,
        sent: int,
        received: int,
        step: int,
        env_action: np.ndarray,
        action: np.ndarray,
        log_prob: np.ndarray,
    ) -> list[np.ndarray]:
        """Step the envs of one split; return the next observation of another."""
        split = self._splits[sent]
        if not np.isfinite(log_prob).all():
            self._raise_diverged(split, log_prob)
        if len(self._splits) == 1:
            self._env.env.step(env_action, out=split.result(step))
            split.record(step, action, log_prob)
            self._on_step()
            self._check(split, step)
            return self._answer(split, step)
        self._env.env.send(env_action, split.env_indices, together=True)
        split.record(step, action, log_prob)
        following = self._splits[received]
        if received != 0:  # its step of this round is yet to be sent
            if step > 0:
                self._receive(following, step - 1)
            return self._answer(following, step - 1)
        self._receive(following, step)
        self._on_step()
        return self._answer(following, step)

    def _answer(self, split: SplitRows, step: int) -> list[np.ndarray]:
        """Return what the graph gets of a step that was received; -1: of none yet."""
        leaves = split.observation_leaves(step + 1)
        return [*leaves, *split.ends(step)] if self._state_sizes else leaves

    def _receive(self, split: SplitRows, step: int) -> None:
        """Wait for a split's step, and store it."""
        self._env.env.recv(env_indices=split.env_indices, out=split.result(step))
        split.store(step)
        self._check(split, step)

    def _check(self, split: SplitRows, step: int) -> None:
        result = split.result(step)
        self._env.check_finite(result.observation, result.reward, split.env_indices)
        bootstrapped = result.truncated & ~result.terminated & result.valid
        if bootstrapped.any():  # the values of their final observations are used
            final = tf.nest.map_structure(
                lambda leaf: leaf[bootstrapped], result.final_observation
            )
            rows = split.env_indices[bootstrapped]
            self._env.check_finite(final, result.reward[bootstrapped], rows)

    def _raise_diverged(self, split: SplitRows, log_prob: np.ndarray) -> None:
        row = int(np.argmin(np.isfinite(log_prob)))
        raise DivergedError(
            f"Env {split.env_indices[row]} of {self._env.env!r}: expected a finite "
            f"log-probability of its action, got {log_prob[row]}; training "
            "has diverged, try a lower learning_rate."
        )


def simulate(
    env: InGraphBatchEnv, policy: Policy, horizon: int, seed: tuple[int, int] = (0, 0)
) -> Rollout:
    """Reset all envs and collect one rollout of `horizon` batch steps.

    For more than one rollout keep a `Simulation`: it is traced and compiled once.
    """
    return Simulation(env, policy, horizon).run(seed)
