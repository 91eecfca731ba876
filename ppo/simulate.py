"""Collect each rollout with a single graph call.

A `tf.while_loop` runs T batch steps. In each step it runs, for each split, the policy
and then one call into Python, which steps the envs of the split. The envs write their
rows directly into the rollout's arrays `[T, B, ...]`.

With several splits, the envs of one split step while the policy computes the actions of
another. The call for a split sends its actions without waiting for the result. It then
receives the pending step of the following split, cyclically, and returns the next
observation of that split. Therefore, when the loop ends, the last step of all splits
except the first is still in flight, and `run` receives it.

On CPUs, the loop and its calls into Python run in the calling thread.
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

__all__ = ["Simulation", "simulate"]

Policy = Callable[..., tuple[tf.Tensor, ...]]
"""Maps a raw observation `[n, ...]` and noise `[n, ...]` to actions `[n, ...]` and
log-probabilities `[n]`. If the `Simulation` draws no noise, the policy gets a seed
(int32 pair) instead. A recurrent policy also takes its states before the observation,
`[n, units]` each, and returns the states after it."""


class Simulation:
    """Collects rollouts of a policy into arrays that are reused.

    Args:
        env: The envs. They are reset when the first rollout starts. Each later rollout
            continues where the previous one ended.
        policy: Returns actions for the rows of one split, `[n, ...]`. It is traced into
            the loop's graph once per split.
        horizon: T, the number of batch steps per rollout.
        on_step: Called after every batch step. An exception ends the rollout.
        snapshot: Returns tensors that the policy receives as its first argument in all
            steps of a rollout; called once per rollout.
        log_prob: Maps all actions `[N, ...]` and the second output of the policy to
            log-probabilities `[N]`; called once per rollout. By default the second
            output is returned unchanged.
        noise: Maps a number of rows and a seed (int32 pair) to noise `[rows, ...]`. It
            is called once per rollout for all rows, so the noise of a row does not
            depend on the splits. By default, the policy gets a seed instead of noise.
        state_sizes: Units of each recurrent core of the policy. The states are zero at
            the start of an episode, and are kept from rollout to rollout.
        sequence_length: Number of batch steps between the states that the rollout
            stores; must divide the horizon. The default is the horizon.
        num_rollouts: Number of rollouts with separate arrays, which are reused
            cyclically. A rollout is overwritten by the `num_rollouts`-th call of `run`
            after it.

    Attributes:
        infos: Infos of the steps that ended an episode in the last rollout, by step and
            env index.
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
        self._states: list[States] = []  # of each split, after the last rollout
        self._graph_input_specs = [env.observation_spec]
        if state_sizes:
            rollout = self._rollout
            flags = (rollout.terminated, rollout.truncated, rollout.status)
            self._graph_input_specs += [
                tf.TensorSpec(f.shape[1:], f.dtype) for f in flags
            ]
        self.infos: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._loop = tf.function(self._run_loop)
        # On CPUs, run the operations in the calling thread: handing them to other
        # threads takes longer than running them, because workers use the cores. With
        # a GPU this is not possible, because the loop on the GPU calls Python.
        has_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._executor = "DEFAULT" if has_gpu else "SINGLE_THREADED_EXECUTOR"
        self._is_started = False

    def run(self, seed: tuple[int, int], snapshot: Any = None) -> Rollout:
        """Collect a rollout.

        Args:
            seed: Seed of the noise, an int32 pair. Use a different one for each
                rollout.
            snapshot: Tensors or variables for the policy, in place of the result of
                the constructor's `snapshot`.

        Returns:
            The rollout. A later call overwrites its arrays, see `num_rollouts`.

        Raises:
            EnvDataError: A reward or an observation is not finite.
            DivergedError: An action or a log-probability is not finite.
            envserve.errors.EnvserveError: The envs failed.
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
            self._is_started = False  # after an exception, the next call resets
            first = [
                tf.nest.map_structure(tf.constant, split.observation(0))
                for split in self._splits
            ]
            with tf.experimental.function_executor_type(self._executor):
                _, self._states, outputs = self._loop(
                    first, states, tf.constant(seed, tf.int32), snapshot
                )
            for split in self._splits[1:]:
                self._receive(split, self._horizon - 1)
            for split, (action, log_prob, state) in zip(
                self._splits, outputs, strict=True
            ):
                self._expect_finite(split, "log-probability", log_prob.numpy())
                split.record_policy_outputs(action, log_prob, state)
            self._is_started = True
        return self._rollout

    def restart(self) -> None:
        """Make the next rollout start with a reset of all envs."""
        self._is_started = False

    def _start(self) -> None:
        """Reset all envs, after receiving steps that an interrupted rollout sent."""
        batch = self._env.env
        while len(self._splits) > 1 and (num_in_flight := batch.num_in_flight):
            try:
                batch.recv(num_in_flight)
            except (EnvError, LocalProtocolError):
                # Ignore errors of the interrupted rollout, unless `recv` makes no
                # progress.
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
        """Run the loop in the graph.

        Args:
            first: The first observation of each split, `[n, ...]`.
            states: The states of each split.
            seed: Seed of the noise, an int32 pair.
            snapshot: See `run`.

        Returns:
            T, the last states of each split, and the result of `_recorded_outputs` for
            each split.
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
        outputs = [
            tf.nest.map_structure(
                self._tensor_array, choose(rows, noise[0], state.after)
            )
            for rows, noise, state in zip(first, noise_by_split, states, strict=True)
        ]  # only for the shapes: TensorFlow prunes these operations from the graph

        def body(step: tf.Tensor, *parts: Any) -> tuple[tf.Tensor, Any, Any, Any]:
            observations, states, outputs = map(list, parts)
            for index, noise_by_step in enumerate(noise_by_split):
                noise = tf.gather(noise_by_step, step)
                state = states[index].after
                action, policy_params, after = choose(observations[index], noise, state)
                outputs[index] = tf.nest.map_structure(
                    lambda array, rows: array.write(step, rows),
                    outputs[index],
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
                    states[following] = states[following].after_result(*leaves[-3:])
                    leaves = leaves[:-3]
                observations[following] = tf.nest.pack_sequence_as(
                    observations[following], leaves
                )
            return step + 1, observations, states, outputs

        step, _, states, outputs = tf.while_loop(
            lambda step, *_: step < self._horizon,
            body,
            (tf.constant(0), first, states, outputs),
            parallel_iterations=1,
        )
        outputs = tf.nest.map_structure(lambda array: array.stack(), outputs)
        return step, states, list(map(self._recorded_outputs, outputs))

    def _tensor_array(self, rows: tf.Tensor) -> tf.TensorArray:
        """Return an array for rows of this shape, one per step."""
        return tf.TensorArray(rows.dtype, self._horizon, element_shape=rows.shape)

    def _recorded_outputs(self, outputs: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
        """Return actions, log-probabilities and states of a split for the rollout."""
        *chosen, states = outputs
        action, policy_params = tf.nest.map_structure(
            lambda rows: tf.reshape(rows, [-1, *rows.shape[2:]]), chosen
        )  # [T, n, ...] -> [T * n, ...]
        log_prob = self._log_prob(action, policy_params)
        first_states = tf.nest.map_structure(
            lambda rows: rows[:: self._sequence_length], states
        )
        return outputs[0], tf.reshape(log_prob, outputs[0].shape[:2]), first_states

    def _noise_by_split(self, seed: tf.Tensor) -> list[tf.Tensor]:
        """Return noise `[T, n, ...]` for each split, or a seed per step `[T, 2]`.

        All noise is drawn before the loop, because drawing it takes more operations
        than a small policy network.
        """
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
        """Step the envs of one split, and return the next observation of another.

        With a single split, that split is stepped and its observation returned.

        Args:
            sent: Index of the split to step.
            received: Index of the split whose observation is returned.
            step: Index of the batch step.
            env_action: Actions of the split to step, `[n, ...]`.
        """
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
        if received != 0:  # its envs are still in the previous step
            if step > 0:
                self._receive(following, step - 1)
            return self._graph_inputs(following, step - 1)
        self._receive(following, step)
        self._on_step()
        return self._graph_inputs(following, step)

    def _graph_inputs(self, split: SplitRows, step: int) -> list[np.ndarray]:
        """Return the policy's inputs after a received step, where -1 is the reset.

        These are the leaves of the next observation and, for a recurrent policy, the
        end flags of the step.
        """
        leaves = split.observation_leaves(step + 1)
        return [*leaves, *split.end_flags(step)] if self._state_sizes else leaves

    def _receive(self, split: SplitRows, step: int) -> None:
        """Receive a step of a split, and store and check it."""
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
        if bootstrapped.any():  # their targets use the value of the final observation
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
            f"{what}, got {rows[step, row]}; training has diverged. Try a lower "
            "learning_rate."
        )


def simulate(
    env: InGraphBatchEnv, policy: Policy, horizon: int, seed: tuple[int, int] = (0, 0)
) -> Rollout:
    """Reset all envs and collect one rollout of `horizon` batch steps.

    To collect several rollouts, use a `Simulation`, which is traced only once.
    """
    return Simulation(env, policy, horizon).run(seed)
