"""Whole rollouts in one graph call.

`simulate` runs T batch steps in one `tf.while_loop`. Each step is, per split, one pass
through the policy and one call into Python, which steps the envs and lets them write
their rows straight into the rollout's arrays `[T, B, ...]`.
"""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from envserve.errors import EnvError, LocalProtocolError
from ppo.agent.networks.recurrent import States
from ppo.errors import DivergedError
from ppo.in_graph_batch_env import InGraphBatchEnv
from ppo.rollout import Rollout, SplitRows, allocate_rollout

Policy = Callable[..., tuple[tf.Tensor, ...]]
"""Maps a raw observation `[n, ...]` and noise `[n, ...]`, or a seed (int32 pair) where
none is drawn, to actions and their log-probabilities `[n]`. One with memory takes its
states `[n, units]` besides, and gives them as they are after that observation."""


class Simulation:
    """Envs, a policy and the arrays for one rollout; `run` fills them again and again.

    Where the batch has several splits, one split's envs step while the policy thinks
    about another's rows; it then sees `[n, ...]`, the rows of one split.

    Args:
        env: the envs; they are reset when the first rollout starts, and each further
            rollout goes on where the last one ended.
        policy: gives actions; traced into the loop's graph, once per split.
        snapshot: gives what the policy gets before all else: tensors that it acts from
            throughout a rollout. It is called once per rollout.
        log_prob: maps all actions `[N, ...]`, and what the policy gave in place of
            log-probabilities, to these; once per rollout.
        horizon: T, batch steps per rollout.
        on_step: called after every batch step; what it raises ends the rollout.
        noise: maps a number of rows and a seed (int32 pair) to noise `[rows, ...]`. It
            is called once per rollout, so that the noise of a row does not depend on
            the splits. By default, the policy gets a seed instead of noise.
        state_sizes: units of each memory of the policy. Their states are zero where an
            episode begins, and go on from rollout to rollout.
        sequence_length: batch steps between the states that the rollout tells; divides
            the horizon, which is the default.
        num_rollouts: arrays that take turns; `run` leaves those of the last few alone.

    Attributes:
        infos: those of the last rollout's ended episodes, by step and env.
    """

    def __init__(
        self,
        env: InGraphBatchEnv,
        policy: Policy,
        horizon: int,
        on_step: Callable[[], None] = lambda: None,
        *,
        snapshot: Callable[[], Any] | None = None,
        log_prob: Callable[[tf.Tensor, Any], tf.Tensor] = lambda _, log_prob: log_prob,
        noise: Callable[[int, tf.Tensor], tf.Tensor] | None = None,
        state_sizes: Sequence[int] = (),
        sequence_length: int = 0,
        num_rollouts: int = 1,
    ) -> None:
        self._env = env
        self._policy = policy
        self._horizon = horizon
        self._on_step = on_step
        self._snapshot = snapshot
        self._log_prob = log_prob
        self._noise = noise
        self._sequence_length = sequence_length or horizon
        num_sequences = horizon // self._sequence_length
        self._buffers = collections.deque[tuple[Rollout, list[SplitRows]]]()
        for _ in range(num_rollouts):
            rollout = allocate_rollout(env, horizon, state_sizes, num_sequences)
            splits = [SplitRows(rollout, rows, horizon) for rows in env.env.splits]
            self._buffers.append((rollout, splits))
        self._rollout, self._splits = self._buffers[0]
        self._state_sizes = tuple(state_sizes)
        self._states: list[States] = []  # by split, after the last rollout
        self._graph_input_specs = [env.observation_spec]
        if state_sizes:
            rollout = self._rollout
            flags = (rollout.terminated, rollout.truncated, rollout.status)
            self._graph_input_specs += [
                tf.TensorSpec(f.shape[1:], f.dtype) for f in flags
            ]
        self.infos: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._loop = tf.function(self._run_loop)
        # In this thread: to hand each operation to others, while workers have the
        # cores, costs more than the operations do. It would be one device's, too.
        has_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._executor = "DEFAULT" if has_gpu else "SINGLE_THREADED_EXECUTOR"
        self._is_started = False

    def run(self, seed: tuple[int, int], snapshot: Any = None) -> Rollout:
        """Collect a rollout.

        Args:
            seed: the same pair gives the same noise; use each once.
            snapshot: for the policy, tensors or variables; by default, taken now.

        Returns:
            The rollout. Its arrays are overwritten by the next call, or a later one if
            there are several.

        Raises:
            EnvDataError: a reward, or an observation that counts, is not finite.
            DivergedError: a log-probability is not finite.
            envserve.errors.EnvserveError: whatever the envs raise.
        """
        before, splits = self._buffers[0]
        self._buffers.rotate()
        self._rollout, self._splits = self._buffers[0]
        self.infos.clear()
        with self._env.original_errors():
            if self._is_started:
                states = [
                    states.after_result(*split.end_flags(self._horizon - 1))
                    for split, states in zip(splits, self._states, strict=True)
                ]
                tf.nest.map_structure(
                    lambda rows, last: np.copyto(rows[0], last[-1]),
                    self._rollout.observation,
                    before.observation,
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
            with tf.experimental.function_executor_type(self._executor):
                _, self._states, given = self._loop(
                    first, states, tf.constant(seed, tf.int32), snapshot
                )
            for split in self._splits[1:]:
                self._receive(split, self._horizon - 1)
            for split, (action, log_prob, state) in zip(
                self._splits, given, strict=True
            ):
                self._expect_finite(split, "log-probability", log_prob.numpy())
                split.record_policy_outputs(action, log_prob, state)
            self._is_started = True
        return self._rollout

    def restart(self) -> None:
        """Reset all envs when the next rollout starts, which then is a first one."""
        self._is_started = False

    def _start(self) -> None:
        """Reset all envs."""
        batch = self._env.env
        while len(self._splits) > 1 and (num_in_flight := batch.num_in_flight):
            try:
                batch.recv(num_in_flight)  # sent in a rollout that was cut short
            except (EnvError, LocalProtocolError):
                # Of that rollout; what comes next is a reset.
                if batch.num_in_flight == num_in_flight:
                    raise
        tf.nest.map_structure(
            lambda rows, first: np.copyto(rows[0], first),
            self._rollout.observation,
            self._env.reset(),
        )

    def _run_loop(
        self, first: list[Any], states: list[States], seed: tf.Tensor, snapshot: Any
    ) -> Any:
        """Run the loop.

        Returns T and, by split, the last states and the values of `_recorded`.
        """
        act = self._policy
        if self._snapshot is not None:
            taken = self._snapshot() if snapshot is None else snapshot
            act = functools.partial(act, tf.nest.map_structure(tf.identity, taken))

        def choose(
            rows: Any, noise: tf.Tensor, state: tuple[tf.Tensor, ...]
        ) -> tuple[tf.Tensor, Any, tuple[tf.Tensor, ...]]:
            action, policy_params, *after = act(rows, noise, *state)
            return action, policy_params, tuple(after)

        noise_by_split = self._noise_by_split(seed)
        given = [
            tf.nest.map_structure(
                self._tensor_array, choose(rows, noise[0], state.after)
            )
            for rows, noise, state in zip(first, noise_by_split, states, strict=True)
        ]  # only the shapes are needed: the graph drops what is not used

        def body(step: tf.Tensor, *parts: Any) -> tuple[tf.Tensor, Any, Any, Any]:
            observations, states, given = map(list, parts)
            for index, noise_by_step in enumerate(noise_by_split):
                noise = tf.gather(noise_by_step, step)
                state = states[index].after
                action, policy_params, after = choose(observations[index], noise, state)
                given[index] = tf.nest.map_structure(
                    lambda array, rows: array.write(step, rows),
                    given[index],
                    (action, policy_params, state),
                )
                states[index] = States(state, after)
                following = (index + 1) % len(self._splits)
                leaves = self._env.host_call(
                    functools.partial(self._exchange, index, following),
                    [step, self._env.to_env_action(action)],
                    self._splits[following].specs(self._graph_input_specs),
                )
                if state:
                    states[following] = states[following].follow(*leaves[-3:])
                    leaves = leaves[:-3]
                observations[following] = tf.nest.pack_sequence_as(
                    observations[following], leaves
                )
            return step + 1, observations, states, given

        step, _, states, given = tf.while_loop(
            lambda step, *_: step < self._horizon,
            body,
            (tf.constant(0), first, states, given),
            parallel_iterations=1,
        )
        given = tf.nest.map_structure(lambda array: array.stack(), given)
        return step, states, list(map(self._recorded_outputs, given))

    def _tensor_array(self, rows: tf.Tensor) -> tf.TensorArray:
        """Return an array for as many such rows as there are steps."""
        return tf.TensorArray(rows.dtype, self._horizon, element_shape=rows.shape)

    def _recorded_outputs(self, given: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
        """Return what a rollout keeps of a split, as `SplitRows.record` takes it."""
        *chosen, states = given
        action, policy_params = tf.nest.map_structure(
            lambda rows: tf.reshape(rows, [-1, *rows.shape[2:]]), chosen
        )  # [T, n, ...] -> [T * n, ...]
        log_prob = self._log_prob(action, policy_params)
        first_states = tf.nest.map_structure(
            lambda rows: rows[:: self._sequence_length], states
        )
        return given[0], tf.reshape(log_prob, given[0].shape[:2]), first_states

    # All of it before the loop: drawing takes more operations than acting does.
    def _noise_by_split(self, seed: tf.Tensor) -> list[tf.Tensor]:
        """Return for each split noise `[T, n, ...]`, or a seed per step `[T, 2]`."""
        horizon, num_envs = self._horizon, self._env.num_envs
        if self._noise is None:
            shape = [len(self._splits), horizon, 2]
            seeds = tf.random.stateless_uniform(
                shape, seed, minval=None, maxval=None, dtype=tf.int32
            )
            return tf.unstack(seeds)
        noise = self._noise(horizon * num_envs, seed)
        noise = tf.reshape(noise, [horizon, num_envs, *noise.shape[1:]])
        return [tf.gather(noise, split.env_indices, axis=1) for split in self._splits]

    def _exchange(
        self, sent: int, received: int, step: int, env_action: np.ndarray
    ) -> list[np.ndarray]:
        """Step the envs of one split; return the next observation of another."""
        split = self._splits[sent]
        if env_action.dtype.kind == "f":
            self._expect_finite(split, "action", env_action[None])
        if len(self._splits) == 1:
            result = self._env.env.step(env_action, out=split.result(step))
            self._on_step()
            self._check(split, step, result.infos)
            return self._graph_inputs(split, step)
        self._env.env.send(env_action, split.env_indices, together=True)
        following = self._splits[received]
        if received != 0:  # its step of this round is yet to be sent
            if step > 0:
                self._receive(following, step - 1)
            return self._graph_inputs(following, step - 1)
        self._receive(following, step)
        self._on_step()
        return self._graph_inputs(following, step)

    def _graph_inputs(self, split: SplitRows, step: int) -> list[np.ndarray]:
        """Return what the graph gets of a step that was received; -1: of none yet."""
        leaves = split.observation_leaves(step + 1)
        return [*leaves, *split.end_flags(step)] if self._state_sizes else leaves

    def _receive(self, split: SplitRows, step: int) -> None:
        """Wait for a split's step, and store it."""
        _, result = self._env.env.recv(
            env_indices=split.env_indices, out=split.result(step)
        )
        split.copy_result(step)
        self._check(split, step, result.infos)

    def _check(self, split: SplitRows, step: int, infos: Mapping[int, Any]) -> None:
        if infos:
            self.infos.update({(int(step), row): infos[row] for row in infos})
        result = split.result(step)
        self._env.check_finite(result.observation, result.reward, split.env_indices)
        bootstrapped = result.truncated & ~result.terminated & result.valid
        if bootstrapped.any():  # the values of their final observations are used
            final = tf.nest.map_structure(
                lambda leaf: leaf[bootstrapped], result.final_observation
            )
            rows = split.env_indices[bootstrapped]
            self._env.check_finite(final, result.reward[bootstrapped], rows)

    def _expect_finite(self, split: SplitRows, what: str, rows: np.ndarray) -> None:
        """Raise `DivergedError` unless all rows `[T, n, ...]` of a split are finite."""
        if np.isfinite(rows).all():
            return
        step, row = np.argwhere(~np.isfinite(rows))[0][:2]
        raise DivergedError(
            f"Env {split.env_indices[row]} of {self._env.env!r}: expected a finite "
            f"{what}, got {rows[step, row]}; training has diverged, try a lower "
            "learning_rate."
        )


def simulate(
    env: InGraphBatchEnv, policy: Policy, horizon: int, seed: tuple[int, int] = (0, 0)
) -> Rollout:
    """Reset all envs and collect one rollout of `horizon` batch steps.

    For more than one rollout keep a `Simulation`: it is traced and compiled once.
    """
    return Simulation(env, policy, horizon).run(seed)
