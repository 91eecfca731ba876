"""Collect rollouts: choose actions, step the envs, and store everything in arrays.

The envs write their rows directly into the rollout's arrays `[T, B, ...]`. The policy
does not change during a rollout, so its noise and log-probabilities are computed once
per rollout, for all steps. A small policy runs in NumPy, in a Python loop, because
calling TensorFlow takes longer than running such a policy. Other policies run in a
`tf.while_loop`, which calls Python once per split and step, in the calling thread.

With several splits (groups of envs), the envs of one split step while the policy
computes the actions of another. The loop sends the actions of a split without waiting
for their result. Instead, it receives the step that is in flight in the next split; the
first split follows the last. At the end of the loop, a step is still in flight in every
split except the first, and `run` receives these steps.

With `act_on` below 1, rows do not wait for each other. The policy acts on the rows that
have arrived as soon as they make up the fraction `act_on` of the batch, and each row
stops after T steps.

A rollout has the same contents in all modes, because the policy does not change, and
the noise depends only on the step and the row.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from threadpoolctl import ThreadpoolController

from envserve.errors import ActionError, EnvError, LocalProtocolError
from ppo.agent.networks.recurrent import States
from ppo.errors import DivergedError
from ppo.in_graph_batch_env import InGraphBatchEnv, check_finite
from ppo.rollout import Rollout, SplitRows, allocate_rollout, step_arrays

__all__ = ["Simulation", "simulate"]

Policy = Callable[..., tuple[tf.Tensor, ...]]
"""Maps an observation and noise to actions and log-probabilities; see `Simulation`."""

Act = Callable[..., tuple[Any, ...]]
"""The policy as a function of NumPy arrays `[n, ...]`: the leaves of an observation,
noise and states. It returns env actions, policy actions, the policy's second output,
and the next states."""


#: Operations of TensorFlow that run functions.
_CONTROL_FLOW = {
    "Case",
    "If",
    "StatelessCase",
    "StatelessIf",
    "StatelessWhile",
    "While",
}


class _Outputs(NamedTuple):
    """Outputs of the policy for the rows of a split, in one step or in all steps."""

    action: np.ndarray
    policy_params: Any
    state: tuple[np.ndarray, ...]
    """The states before the step."""


class Simulation:
    """Collects rollouts of a policy into arrays that are reused.

    The first three arguments suffice, unless the policy is recurrent.

    Args:
      env: The envs. They are reset when the first rollout starts. Each later rollout
        continues where the previous one ended.
      policy: Function `(observation, seed) -> (action, log_prob)` of tensors. Its
        arguments are the observations of one split, `[n, ...]`, and an int32 pair,
        which differs in every step. It returns policy actions (see
        `InGraphBatchEnv`) and their log-probabilities `[n]`. It is traced into a
        graph once per split. With `noise`, noise `[n, ...]` replaces the seed. A
        recurrent policy takes its states `[n, units]` as further arguments, and
        also returns the states after the observation.
      horizon: T, the number of batch steps per rollout.
      on_step: Called after every batch step, or, with `act_on` below 1, whenever rows
        have arrived. An exception ends the rollout.
      snapshot: Returns tensors that the policy receives as its first argument in all
        steps of a rollout; called once per rollout.
      in_numpy: Called once per rollout with a snapshot and a maximum number of rows;
        returns the policy as a function of NumPy arrays, or None if the policy
        exists only in TensorFlow. See `Agent.in_numpy`.
      log_prob: Maps all actions `[N, ...]` and the second output of the policy to
        log-probabilities `[N]`; called once per rollout. By default the second
        output is returned unchanged.
      noise: Maps a number of rows and a seed (int32 pair) to noise `[rows, ...]`. It
        is called once per rollout for all rows, so the noise of a row does not
        depend on the splits.
      state_sizes: Number of units of each recurrent core. The states are zero at
        the start of an episode, and are kept from rollout to rollout.
      sequence_length: Number of batch steps between the states that the rollout
        stores; must divide the horizon. By default, the horizon.
      act_on: Fraction of the rows that must have arrived before the policy acts on
        them. A fraction below 1 requires `noise`, a policy that accepts any number
        of rows, and envs with a single split. The rows of a worker arrive together.
      num_rollouts: Number of rollouts with separate arrays, which are reused
        cyclically. A rollout is overwritten by the `num_rollouts`-th call to `run`
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
        in_numpy: Callable[[Any, int], Act | None] = lambda snapshot, num_rows: None,
        log_prob: Callable[[tf.Tensor, Any], tf.Tensor] = lambda _, log_prob: log_prob,
        noise: Callable[[int, tf.Tensor], tf.Tensor] | None = None,
        state_sizes: Sequence[int] = (),
        sequence_length: int = 0,
        act_on: float = 1.0,
        num_rollouts: int = 1,
    ) -> None:
        self._env = env
        self._policy = policy
        self._horizon = horizon
        self._on_step = on_step
        self._snapshot = snapshot
        self._in_numpy = in_numpy
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
        #: One per split, after the last rollout; empty if the envs must be reset.
        self._states: list[States] = []
        self.infos: dict[tuple[int, int], Mapping[str, Any]] = {}
        if act_on < 1 and (noise is None or len(self._splits) > 1):
            raise ValueError(
                "act_on: a fraction below 1 requires `noise` and envs with a single "
                f"split; got {act_on} with {len(self._splits)} splits"
            )
        self._min_envs = math.ceil(act_on * env.num_envs)
        self._is_synchronous = self._min_envs == env.num_envs
        self._act_in_tensorflow = tf.function(
            self._run_policy, reduce_retracing=not self._is_synchronous
        )
        self._graph_loop = tf.function(self._run_graph_loop)
        self._log_prob = log_prob
        # Multithreading slows the matrix products of small networks down.
        self._blas = ThreadpoolController().select(user_api="blas")
        # On CPUs, run operations in the calling thread: handing them to other threads
        # takes longer than running them, because local workers keep the cores busy.
        # With a GPU, this is not possible, because the loop on the GPU calls Python.
        has_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._executor = "DEFAULT" if has_gpu else "SINGLE_THREADED_EXECUTOR"
        self._is_executor_checked = False

    def run(
        self,
        seed: tuple[int, int] | tf.Tensor,
        snapshot: Any = None,
        *,
        reset: bool = False,
    ) -> Rollout:
        """Collect a rollout.

        In a `tf.function`, `run` is one operation, which returns the rollout as
        tensors. Call that `tf.function` within `InGraphBatchEnv.original_errors`.

        Args:
          seed: Seed of the noise, an int32 pair. Use a different one for each
            rollout.
          snapshot: Tensors or variables for the policy, in place of the result of
            the constructor's `snapshot`.
          reset: Whether to reset all envs first, as in the first rollout.

        Returns:
          The rollout. A later call overwrites its arrays; see `num_rollouts`.

        Raises:
          EnvDataError: A reward or an observation is not finite.
          DivergedError: An action or a log-probability is not finite.
          envserve.errors.EnvserveError: The envs failed.
        """
        if tf.inside_function():
            return self._run_in_graph(seed, snapshot, reset=reset)
        return self._collect(seed, snapshot, reset=reset)

    def _run_in_graph(self, seed: Any, snapshot: Any, *, reset: bool) -> Rollout:
        """Return a rollout as tensors, which are outputs of one graph operation."""
        if self._snapshot is not None and snapshot is None:
            snapshot = self._snapshot()
        inputs = [seed, () if snapshot is None else snapshot]

        def collect(*arrays: np.ndarray) -> list[np.ndarray]:
            tensors = list(map(tf.constant, arrays))
            seed, snapshot = tf.nest.pack_sequence_as(inputs, tensors)
            rollout = self._collect(seed, snapshot, reset=reset)
            # Copy the arrays, because tensors would share their memory, which is
            # reused.
            return list(map(np.array, tf.nest.flatten(rollout)))

        specs = tf.nest.map_structure(
            lambda rows: tf.TensorSpec(rows.shape, rows.dtype), self._rollout
        )
        # TensorFlow cannot detect that the operation reads the policy's variables. Read
        # them before and after it, so that assignments are not moved across it.
        variables = self._policy_variables(snapshot)
        with tf.control_dependencies([variable.read_value() for variable in variables]):
            tensors = list(map(tf.convert_to_tensor, tf.nest.flatten(inputs)))
            outputs = self._env.host_calls.call(
                collect, tensors, tf.nest.flatten(specs)
            )
        with tf.control_dependencies(outputs):
            for variable in variables:
                variable.read_value()
        return tf.nest.pack_sequence_as(specs, outputs)

    def _policy_variables(self, snapshot: Any) -> Sequence[tf.Variable]:
        """Return all variables that the policy reads, except the snapshot's."""
        with tf.init_scope():
            noise = self._noise_by_split(tf.zeros([2], tf.int32))
        split, sizes = self._splits[0], self._state_sizes
        leaves = [tf.TensorSpec(x.shape, x.dtype) for x in split.observation_leaves(0)]
        compiled = self._act_in_tensorflow.get_concrete_function(
            snapshot,
            leaves,
            tf.TensorSpec(noise[0].shape[1:], noise[0].dtype),
            tuple(tf.TensorSpec([len(split.env_indices), size]) for size in sizes),
        )
        return compiled.variables

    def _collect(
        self, seed: tuple[int, int] | tf.Tensor, snapshot: Any, *, reset: bool
    ) -> Rollout:
        previous, splits = self._buffers[0]
        self._buffers.rotate()
        self._rollout, self._splits = self._buffers[0]
        self.infos.clear()
        last_states, self._states = self._states, []  # stays empty after an exception
        if last_states and not reset:
            states = [
                states.after_result(*split.end_flags(self._horizon - 1))
                for split, states in zip(splits, last_states, strict=True)
            ]
            tf.nest.map_structure(
                lambda rows, last: np.copyto(rows[0], last[-1]),
                self._rollout.observation,
                previous.observation,
            )
        else:
            states = [
                States.zero(len(split.env_indices), self._state_sizes)
                for split in self._splits
            ]
            self._reset_envs()
        with (
            tf.experimental.function_executor_type(self._executor),
            self._blas.limit(limits=1),
        ):
            if self._snapshot is not None and snapshot is None:
                snapshot = self._snapshot()
            act = self._in_numpy(snapshot, self._env.num_envs)
            noise = self._noise_by_split(tf.cast(seed, tf.int32))
            if not self._is_synchronous:
                if act is None:
                    act = functools.partial(self._call_policy, snapshot)
                outputs, states = self._run_as_rows_arrive(act, noise[0], states[0])
            elif act is None:
                with self._env.host_calls.original_errors():
                    outputs, states = self._call_compiled(
                        self._graph_loop, snapshot, noise, states
                    )
            else:
                outputs, states = self._run_loop(act, noise, states)
            for split in self._splits[1:]:
                self._receive(split, self._horizon - 1)
            self._check_results()
            for split, stacked in zip(self._splits, outputs, strict=True):
                self._store_outputs(split, tf.nest.map_structure(np.asarray, stacked))
        self._states = tf.nest.map_structure(np.asarray, states)
        return self._rollout

    def _reset_envs(self) -> None:
        """Reset all envs, after receiving steps that an interrupted rollout sent."""
        batch = self._env.env
        # `reset` discards the result of an interrupted `step`. The results of `send`
        # must be received before a reset.
        uses_send = len(self._splits) > 1 or not self._is_synchronous
        while uses_send and (num_in_flight := batch.num_in_flight):
            try:
                batch.recv(num_in_flight)
            except (EnvError, LocalProtocolError):
                # Ignore errors of the interrupted rollout while rows still arrive.
                if batch.num_in_flight == num_in_flight:
                    raise
        tf.nest.map_structure(
            lambda rows, first: np.copyto(rows[0], first),
            self._rollout.observation,
            self._env.reset(),
        )

    def _run_loop(
        self, act: Act, noise: Sequence[np.ndarray], states: list[States]
    ) -> tuple[list[_Outputs], list[States]]:
        """Run the policy in NumPy and step the envs until the end of the rollout.

        Args:
          act: The policy.
          noise: Noise of each split, `[T, n, ...]`.
          states: The states of each split.

        Returns:
          For each split, the outputs of the policy, `[T, n, ...]`, and the states
          after the rollout.
        """
        splits, num_splits = self._splits, len(self._splits)
        outputs: list[list[tuple[Any, ...]]] = [[] for _ in splits]
        states = list(states)
        for step in range(self._horizon):
            for index, split in enumerate(splits):
                state = states[index].after
                env_action, action, policy_params, *after = act(
                    split.observation_leaves(step), noise[index][step], *state
                )
                outputs[index].append((action, policy_params, state))
                self._step_envs(index, step, env_action)
                if state:
                    states[index] = States(state, tuple(after))
                    following = (index + 1) % num_splits
                    received = step - (following > index)
                    flags = splits[following].end_flags(received)
                    states[following] = states[following].after_result(*flags)
        return [_Outputs(*_stack(steps)) for steps in outputs], states

    def _run_graph_loop(
        self, snapshot: Any, noise: list[Any], states: list[States]
    ) -> tuple[list[_Outputs], list[States]]:
        """Do the same as `_run_loop`, with the policy and the loop in TensorFlow.

        `noise` contains noise or seeds, as returned by `_noise_by_split`.
        """
        num_leaves = len(tf.nest.flatten(self._env.observation_spec))

        def act(rows: Any, noise: Any, state: Any) -> tuple[Any, _Outputs, Any]:
            env_action, action, policy_params, *after = self._run_policy(
                snapshot, rows, noise, state
            )
            return env_action, _Outputs(action, policy_params, state), tuple(after)

        def inputs(index: int, step: int) -> list[np.ndarray]:
            split = self._splits[index]  # of this rollout, not of the first one
            leaves = split.observation_leaves(step + 1)
            return [*leaves, *split.end_flags(step)] if self._state_sizes else leaves

        def step_envs(index: int, following: int, step: int, env_action: Any) -> Any:
            self._step_envs(index, int(step), env_action)
            return inputs(following, int(step) - (following > index))

        indices = range(len(self._splits))
        specs = [
            [tf.TensorSpec(rows.shape, rows.dtype) for rows in inputs(index, -1)]
            for index in indices
        ]
        observations = [
            self._env.host_calls.call(
                functools.partial(inputs, index, -1), [], specs[index]
            )[:num_leaves]
            for index in indices
        ]
        outputs = []
        for rows, split_noise, state in zip(observations, noise, states, strict=True):
            # This call only determines shapes; TensorFlow prunes its operations.
            _, step_outputs, _ = act(rows, split_noise[0], state.after)
            outputs.append(tf.nest.map_structure(self._tensor_array, step_outputs))

        def body(step: tf.Tensor, *parts: Any) -> tuple[tf.Tensor, Any, Any, Any]:
            observations, states, outputs = map(list, parts)
            for index, split_noise in enumerate(noise):
                state = states[index].after
                env_action, step_outputs, after = act(
                    observations[index], tf.gather(split_noise, step), state
                )
                outputs[index] = tf.nest.map_structure(
                    lambda array, rows: array.write(step, rows),
                    outputs[index],
                    step_outputs,
                )
                states[index] = States(state, after)
                following = (index + 1) % len(indices)
                leaves = self._env.host_calls.call(
                    functools.partial(step_envs, index, following),
                    [step, env_action],
                    specs[following],
                )
                observations[following] = leaves[:num_leaves]
                flags = leaves[num_leaves:]
                if flags:
                    states[following] = states[following].after_result(*flags)
            return step + 1, observations, states, outputs

        _, _, states, outputs = tf.while_loop(
            lambda step, *_: step < self._horizon,
            body,
            (tf.constant(0), observations, states, outputs),
            parallel_iterations=1,
        )
        return tf.nest.map_structure(lambda array: array.stack(), outputs), states

    def _call_compiled(self, function: Any, *inputs: Any) -> Any:
        """Call a function with the policy, in the default executor if it has `tf.cond`.

        The single-threaded executor runs the functions of control flow in threads of
        TensorFlow, and waits forever if there is only one (`inter_op_threads`).
        """
        if not (self._is_executor_checked or tf.config.functions_run_eagerly()):
            graph = function.get_concrete_function(*inputs).graph.as_graph_def()
            # The nodes of the loop's graph are those of the loop, not of the policy.
            policy_nodes = () if function is self._graph_loop else graph.node
            functions = (each.node_def for each in graph.library.function)
            nodes = itertools.chain(policy_nodes, *functions)
            if any(node.op in _CONTROL_FLOW for node in nodes):
                self._executor = "DEFAULT"
            self._is_executor_checked = True
        with tf.experimental.function_executor_type(self._executor):
            return function(*inputs)

    def _tensor_array(self, rows: tf.Tensor) -> tf.TensorArray:
        """Return a tensor array for T tensors with the shape and dtype of `rows`."""
        return tf.TensorArray(rows.dtype, self._horizon, element_shape=rows.shape)

    def _run_as_rows_arrive(
        self, act: Act, noise: np.ndarray, states: States
    ) -> tuple[list[_Outputs], list[States]]:
        """Act on rows as they arrive, until each row has taken T steps.

        Args:
          act: The policy.
          noise: Noise `[T, B, ...]`.
          states: The states of all rows.

        Returns:
          Lists with one item for the only split: the outputs of the policy,
          `[T, B, ...]`, and the states after the rollout.
        """
        batch, rollout, horizon = self._env.env, self._rollout, self._horizon
        observations = tf.nest.flatten(rollout.observation)
        results = tf.nest.flatten(step_arrays(rollout))
        before = [rows.copy() for rows in states.after]
        after = [rows.copy() for rows in states.after]
        outputs: list[np.ndarray] = []  # leaves of `_Outputs`, [T, B, ...] each
        steps = np.zeros(batch.num_envs, np.int64)  # steps that each row has taken
        rows = np.arange(batch.num_envs)
        while rows.size or batch.num_in_flight:
            if rows.size:
                index = steps[rows], rows
                state = tuple(part[rows] for part in before)
                inputs = [leaf[index] for leaf in observations]
                env_action, action, policy_params, *next_state = act(
                    inputs, noise[index], *state
                )
                step_outputs = _Outputs(action, policy_params, state)
                leaves = tf.nest.flatten(step_outputs)
                if not outputs:
                    shape = horizon, batch.num_envs
                    outputs = [
                        np.zeros((*shape, *x.shape[1:]), x.dtype) for x in leaves
                    ]
                for array, part in zip(outputs, leaves, strict=True):
                    array[index] = part
                for array, part in zip(after, next_state, strict=True):
                    array[rows] = part
                try:
                    batch.send(env_action, rows)
                except ActionError:
                    self._check_policy(rows, inputs, env_action)
                    raise
            rows, result = batch.recv(min(self._min_envs, batch.num_in_flight))
            index = steps[rows], rows
            received = tf.nest.flatten(result._replace(infos={}))
            for array, part in zip(results, received, strict=True):
                array[index] = part
            self._on_step()
            for row, info in result.infos.items():
                self.infos[int(steps[row]), row] = info
            if before:
                flags = result.terminated, result.truncated, result.status
                pair = [tuple(x[rows] for x in part) for part in (before, after)]
                following = States(*pair).after_result(*flags).after
                for array, part in zip(before, following, strict=True):
                    array[rows] = part
            steps[rows] += 1
            is_unfinished = steps[rows] < horizon
            # Keep `rows` if possible: `send` is fastest with the array from `recv`.
            if not is_unfinished.all():
                rows = rows[is_unfinished]
        stacked = tf.nest.pack_sequence_as(step_outputs, outputs)
        return [stacked], [States(tuple(before), tuple(before))]

    def _call_policy(
        self,
        snapshot: Any,
        leaves: Sequence[np.ndarray],
        noise: np.ndarray,
        *state: np.ndarray,
    ) -> tuple[Any, ...]:
        """Run the policy in TensorFlow on NumPy arrays; see `Act`."""
        inputs = tf.nest.map_structure(tf.constant, (list(leaves), noise, state))
        outputs = self._call_compiled(self._act_in_tensorflow, snapshot, *inputs)
        return tf.nest.map_structure(lambda rows: rows.numpy(), outputs)

    def _run_policy(
        self, snapshot: Any, leaves: list[tf.Tensor], noise: tf.Tensor, state: Any
    ) -> tuple[Any, ...]:
        observation = tf.nest.pack_sequence_as(self._env.observation_spec, leaves)
        arguments = [] if self._snapshot is None else [snapshot]
        outputs = self._policy(*arguments, observation, noise, *state)
        shape = [leaves[0].shape[0], *self._env.action_spec.shape[1:]]
        _check_policy_outputs(outputs, shape, len(state))
        action, *others = outputs
        return self._env.to_env_action(action), action, *others

    def _store_outputs(self, split: SplitRows, outputs: _Outputs) -> None:
        """Store the policy outputs of a split, and compute their log-probabilities.

        Args:
          split: The rows of the split.
          outputs: The outputs of all T steps, `[T, n, ...]`.
        """
        action, policy_params, states = outputs
        # Do not use a `tf.function`: TensorFlow would run it in another thread, and
        # waiting for a core for that thread takes longer than these few operations.
        log_prob = self._log_prob(
            *tf.nest.map_structure(
                lambda rows: tf.constant(rows.reshape(-1, *rows.shape[2:])),
                (action, policy_params),
            )
        )  # [T, n, ...] -> [T * n, ...]
        log_prob, num_actions = log_prob.numpy(), math.prod(action.shape[:2])
        if log_prob.size != num_actions:
            raise ValueError(
                "policy: expected one log-probability per action, got "
                f"{log_prob.size} for {num_actions} actions; sum over the elements of "
                "each action, but not over rows"
            )
        log_prob = log_prob.reshape(action.shape[:2])
        self._expect_finite(split.env_indices, "log-probability", log_prob)
        initial = [rows[:: self._sequence_length] for rows in states]
        split.record_policy_outputs(action, log_prob, initial)

    def _noise_by_split(self, seed: tf.Tensor) -> list[np.ndarray]:
        """Return noise `[T, n, ...]` for each split, or a seed per step `[T, 2]`.

        The seeds are for a policy that draws its own noise. Otherwise, all noise is
        drawn before the loop, because drawing it takes longer than running a small
        policy network.
        """
        horizon, num_envs = self._horizon, self._env.num_envs
        if self._noise is None:
            shape = [len(self._splits), horizon, 2]
            seeds = tf.random.stateless_uniform(
                shape, seed, minval=None, maxval=None, dtype=tf.int32
            )
            return list(seeds.numpy())
        noise = np.asarray(self._noise(horizon * num_envs, seed))
        noise = noise.reshape(horizon, num_envs, *noise.shape[1:])
        return [noise[:, split.rows] for split in self._splits]

    def _step_envs(self, index: int, step: int, env_action: np.ndarray) -> None:
        """Step the envs of a split, and receive the next observation to act on.

        With several splits, this is the observation of the following split.

        Args:
          index: Index of the split.
          step: Index of the batch step.
          env_action: Actions of the split's envs, `[n, ...]`.
        """
        split, batch = self._splits[index], self._env.env
        try:
            if len(self._splits) == 1:
                result = batch.step(env_action, out=split.result(step))
                self._on_step()
                self._store_infos(step, result.infos)
                return
            batch.send(env_action, split.env_indices, together=True)
        except ActionError:
            leaves = split.observation_leaves(step)
            self._check_policy(split.env_indices, leaves, env_action)
            raise
        if index == len(self._splits) - 1:
            self._receive(self._splits[0], step)
            self._on_step()
        elif step > 0:  # the envs of the following split are still in the previous step
            self._receive(self._splits[index + 1], step - 1)

    def _receive(self, split: SplitRows, step: int) -> None:
        """Receive the result of a step of a split, and store it in the rollout."""
        _, result = self._env.env.recv(
            env_indices=split.env_indices, out=split.result(step)
        )
        split.copy_result(step)
        self._store_infos(step, result.infos)

    def _store_infos(self, step: int, infos: Mapping[int, Any]) -> None:
        for env_index, info in infos.items():
            self.infos[step, env_index] = info

    def _check_results(self) -> None:
        """Check that all rewards and all observations of the rollout are finite.

        One check of all steps takes much less time than one check per step.
        """
        env, result = self._env.env, step_arrays(self._rollout)
        observation = tf.nest.map_structure(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), result.observation
        )  # [T, B, ...] -> [T * B, ...]
        env_indices = np.tile(np.arange(env.num_envs), self._horizon)
        check_finite(env, observation, result.reward.ravel(), env_indices)
        bootstrapped = result.truncated & ~result.terminated & result.valid
        # The target of a truncated step uses the value of its final observation.
        if bootstrapped.any():
            final = tf.nest.map_structure(
                lambda leaf: leaf[bootstrapped], result.final_observation
            )
            _, rows = bootstrapped.nonzero()
            check_finite(env, final, env_indices=rows)

    def _check_policy(
        self, env_indices: np.ndarray, leaves: Any, env_action: np.ndarray
    ) -> None:
        """Raise an error if inputs or actions of the policy are not finite.

        Called after `BatchEnv` has rejected the actions, to find the cause.

        Args:
          env_indices: Index of each row's env, `[n]`.
          leaves: Observations, `[n, ...]` each.
          env_action: Actions, `[n, ...]`.
        """
        check_finite(self._env.env, leaves, env_indices=env_indices)
        if env_action.dtype.kind == "f":
            self._expect_finite(env_indices, "action", env_action[None])

    def _expect_finite(
        self, env_indices: np.ndarray, name: str, rows: np.ndarray
    ) -> None:
        """Raise `DivergedError` unless the rows `[T, n, ...]` of envs are finite."""
        if np.isfinite(rows).all():
            return
        step, row = np.argwhere(~np.isfinite(rows))[0][:2]
        raise DivergedError(
            f"Env {env_indices[row]} of {self._env.env.spec.env_name}: expected a "
            f"finite {name}, got {rows[step, row]}; training has diverged. Try a lower "
            "learning_rate."
        )


@tf.autograph.experimental.do_not_convert
def _check_policy_outputs(outputs: Any, shape: list[int | None], states: int) -> None:
    """Check the shape of a policy's actions, and the number of its outputs.

    Otherwise, actions `[n, 1]` for Discrete, for example, would be stepped, and fail
    only at the end of the rollout.

    Raises:
      ValueError: The outputs are invalid.
    """
    expected = (
        f"a tuple of actions {shape} and log-probabilities (act_from of an agent: "
        "distribution parameters)"
    )
    if states:
        expected += f", followed by the next states ({states})"
    found = f"{outputs!r:.200}"
    is_complete = isinstance(outputs, tuple | list) and len(outputs) == 2 + states
    if is_complete and hasattr(outputs[0], "shape"):
        if tf.TensorShape(shape).is_compatible_with(outputs[0].shape):
            return
        found = f"actions {[*outputs[0].shape]}"
    error = ValueError(f"policy: expected {expected}, got {found}")
    # Otherwise, AutoGraph would expand the message to many lines.
    error.ag_pass_through = True  # type: ignore[attr-defined]
    raise error


def _stack(steps: Sequence[Any]) -> Any:
    """Stack the arrays, or nested tuples of arrays, of all steps along a new axis."""
    if isinstance(steps[0], tuple):
        return tuple(map(_stack, zip(*steps, strict=True)))
    return np.concatenate(steps).reshape(len(steps), *steps[0].shape)


def simulate(
    env: InGraphBatchEnv, policy: Policy, horizon: int, seed: tuple[int, int] = (0, 0)
) -> Rollout:
    """Reset all envs and collect one rollout of `horizon` batch steps.

    To collect several rollouts, use a `Simulation`, which compiles the policy once.
    """
    return Simulation(env, policy, horizon).run(seed, reset=True)
