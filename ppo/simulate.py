"""Whole rollouts in one graph call.

`simulate` runs T batch steps in one `tf.while_loop`. Each step is, per split, one pass
through the policy and one call into Python, which steps the envs and lets them write
their rows straight into the rollout's arrays `[T, B, ...]`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from envserve.client import StepResult
from envserve.errors import EnvError, LocalProtocolError
from ppo.errors import DivergedError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.networks.recurrent import States

__all__ = ["DrawNoise", "Policy", "Rollout", "Simulation", "simulate"]

Policy = Callable[..., tuple[tf.Tensor, ...]]
"""Maps a raw observation `[n, ...]` and noise `[n, ...]`, or a seed (int32 pair) where
none is drawn, to actions and their log-probabilities `[n]`. One with memory takes its
states `[n, units]` besides, and gives them as they are after that observation."""

DrawNoise = Callable[[int, tf.Tensor], tf.Tensor]
"""Maps a number of rows and a seed (int32 pair) to noise `[rows, ...]`."""


class Rollout(NamedTuple):
    """What T batch steps of B envs gave, as NumPy arrays.

    Row `[t, b]` holds the observation that env b was in, the policy's action there,
    and what the env answered. `final_observation` is only meaningful where the episode
    ended; where `valid` is false, everything but the observation is made up.
    """

    observation: Any  # [T + 1, B, ...]: the last one is still to be acted on
    action: np.ndarray
    log_prob: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    final_observation: Any
    status: np.ndarray  # uint8, see `envserve.slab.Status`
    state: Any = ()  # of each memory: [K, B, units], before step 0, T / K, 2 T / K, ...

    @property
    def done(self) -> np.ndarray:
        """Where an episode ended, bool `[T, B]`."""
        return self.terminated | self.truncated


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
        self._rollout = _allocate(
            env, horizon, state_sizes, horizon // self._sequence_length
        )
        self._splits = [
            _Split(self._rollout, env_indices, horizon)
            for env_indices in env.env.splits
        ]
        self._state_sizes = tuple(state_sizes)
        self._states: list[States] = []  # by split, after the last rollout
        flags = (
            self._rollout.terminated,
            self._rollout.truncated,
            self._rollout.status,
        )
        self._answer_spec = [env.observation_spec]
        if state_sizes:
            self._answer_spec += [tf.TensorSpec(f.shape[1:], f.dtype) for f in flags]
        self._loop = tf.function(self._steps)
        self._is_started = False

    @property
    def num_traces(self) -> int:
        """How often the loop has been traced: once, however many rollouts were run."""
        return int(self._loop.experimental_get_tracing_count())

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
                tf.nest.map_structure(_carry_over, self._rollout.observation)
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
        first = self._env.reset()
        tf.nest.map_structure(_write_first, self._rollout.observation, first)

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

    def _answer(self, split: "_Split", step: int) -> list[np.ndarray]:
        """Return what the graph gets of a step that was received; -1: of none yet."""
        leaves = split.observation_leaves(step + 1)
        return [*leaves, *split.ends(step)] if self._state_sizes else leaves

    def _receive(self, split: "_Split", step: int) -> None:
        """Wait for a split's step, and store it."""
        self._env.env.recv(env_indices=split.env_indices, out=split.result(step))
        split.store(step)
        self._check(split, step)

    def _check(self, split: "_Split", step: int) -> None:
        result = split.result(step)
        self._env.check_finite(result.observation, result.reward, split.env_indices)
        bootstrapped = result.truncated & ~result.terminated & result.valid
        if bootstrapped.any():  # the values of their final observations are used
            final = tf.nest.map_structure(
                lambda leaf: leaf[bootstrapped], result.final_observation
            )
            rows = split.env_indices[bootstrapped]
            self._env.check_finite(final, result.reward[bootstrapped], rows)

    def _raise_diverged(self, split: "_Split", log_prob: np.ndarray) -> None:
        row = int(np.argmin(np.isfinite(log_prob)))
        raise DivergedError(
            f"Env {split.env_indices[row]} of {self._env.env!r}: expected a finite "
            f"log-probability of its action, got {log_prob[row]}; training "
            "has diverged, try a lower learning_rate."
        )


class _Split:
    """The rows of one split in a rollout.

    Where they follow each other, results are written straight into the rollout; else,
    as with several servers, by way of arrays of the split's own.
    """

    def __init__(self, rollout: Rollout, env_indices: np.ndarray, horizon: int) -> None:
        self.env_indices = env_indices
        self._rollout = rollout
        start, stop = int(env_indices[0]), int(env_indices[-1]) + 1
        self._is_range = stop - start == len(env_indices)
        self._rows: Any = slice(start, stop) if self._is_range else env_indices
        count = horizon if self._is_range else 1
        self._results = [self._result_rows(step) for step in range(count)]
        self._observations = [self._observation_rows(step) for step in range(count + 1)]

    def result(self, step: int) -> StepResult:
        """Return where the envs have to write a step."""
        return self._results[step if self._is_range else 0]

    def store(self, step: int) -> None:
        """Take a step into the rollout that was written where `result` says."""
        if not self._is_range:
            target = _step_views(self._rollout, step)
            for rows, row in zip(
                tf.nest.flatten(target[:7]),
                tf.nest.flatten(self.result(step)[:7]),
                strict=True,
            ):
                rows[self._rows] = row

    def record(self, step: int, action: np.ndarray, log_prob: np.ndarray) -> None:
        """Store what the policy gave."""
        self._rollout.action[step][self._rows] = action
        self._rollout.log_prob[step][self._rows] = log_prob

    def observation_leaves(self, step: int) -> list[np.ndarray]:
        """Return the observation that the policy has to act on."""
        if self._is_range:
            return self._observations[step]
        return self._observation_rows(step)

    def observation(self, step: int) -> Any:
        """Return the same, structured as the space."""
        leaves = self.observation_leaves(step)
        return tf.nest.pack_sequence_as(self._rollout.observation, leaves)

    def ends(self, step: int) -> list[np.ndarray]:
        """Return terminated, truncated and status of a step; -1: as if of none."""
        rollout = self._rollout
        flags = (rollout.terminated, rollout.truncated, rollout.status)
        if step < 0:
            return [np.zeros(len(self.env_indices), rows.dtype) for rows in flags]
        return [rows[step][self._rows] for rows in flags]

    def store_states(self, stored: Sequence[tf.Tensor]) -> None:
        """Store what the policy's memories held at the beginning of each sequence."""
        for rows, states in zip(self._rollout.state, stored, strict=True):
            rows[:, self._rows] = states

    def specs(self, batch_specs: Any) -> list[tf.TensorSpec]:
        """Return the specs of an observation's leaves, given those of the batch."""
        return [
            tf.TensorSpec([len(self.env_indices), *spec.shape[1:]], spec.dtype)
            for spec in tf.nest.flatten(batch_specs)
        ]

    def _result_rows(self, step: int) -> StepResult:
        whole: Any = _step_views(self._rollout, step)
        rows = tf.nest.map_structure(lambda array: array[self._rows], whole[:7])
        return StepResult._make((*rows, {}))

    def _observation_rows(self, step: int) -> list[np.ndarray]:
        leaves = tf.nest.flatten(self._rollout.observation)
        return [leaf[step][self._rows] for leaf in leaves]


def simulate(
    env: InGraphBatchEnv, policy: Policy, horizon: int, seed: tuple[int, int] = (0, 0)
) -> Rollout:
    """Reset all envs and collect one rollout of `horizon` batch steps.

    For more than one rollout keep a `Simulation`: it is traced and compiled once.
    """
    return Simulation(env, policy, horizon).run(seed)


def _allocate(
    env: InGraphBatchEnv, horizon: int, state_sizes: Sequence[int], num_sequences: int
) -> Rollout:
    def rows(spec: tf.TensorSpec, length: int) -> np.ndarray:
        return np.zeros((length, *spec.shape), spec.dtype.as_numpy_dtype)

    batch = (horizon, env.num_envs)
    return Rollout(
        observation=tf.nest.map_structure(
            lambda spec: rows(spec, horizon + 1), env.observation_spec
        ),
        action=rows(env.action_spec, horizon),
        log_prob=np.zeros(batch, np.float32),
        reward=np.zeros(batch, np.float64),
        terminated=np.zeros(batch, np.bool_),
        truncated=np.zeros(batch, np.bool_),
        valid=np.zeros(batch, np.bool_),
        final_observation=tf.nest.map_structure(
            lambda spec: rows(spec, horizon), env.observation_spec
        ),
        status=np.zeros(batch, np.uint8),
        state=tuple(
            np.zeros((num_sequences, env.num_envs, size), np.float32)
            for size in state_sizes
        ),
    )


def _step_views(rollout: Rollout, step: int) -> StepResult:
    """Return the rows of one step, for the envs to write into."""
    return StepResult(
        observation=tf.nest.map_structure(
            lambda leaf: leaf[step + 1], rollout.observation
        ),
        reward=rollout.reward[step],
        terminated=rollout.terminated[step],
        truncated=rollout.truncated[step],
        valid=rollout.valid[step],
        final_observation=tf.nest.map_structure(
            lambda leaf: leaf[step], rollout.final_observation
        ),
        status=rollout.status[step],
        infos={},
    )


def _write_first(rows: np.ndarray, first: Any) -> None:
    rows[0] = first


def _carry_over(rows: np.ndarray) -> None:
    rows[0] = rows[-1]
