"""The result of a batch step, and copying it from the rows of the lanes."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium.spaces import Space

from envserve.client.row_set import BatchBlock, RowSet
from envserve.errors import EnvError, EnvserveError
from envserve.lane import Outcome
from envserve.slab import LATE, OK, Rows
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.info_columns import RowInfos
from envserve.spaces.leaves import Array, flatten, unbatch, unflatten
from envserve.spaces.variable_length import decode_observation

#: Minimum size of an array that gets its own memory mapping; see `_zeros`.
_LARGE_BYTES: Final = 1 << 16


class StepResult(NamedTuple):
    """The result of a step of n envs. Observations are nested like their space.

    Attributes:
      observation: `[n, ...]`, with the dtypes of the observation space. In rows whose
        episode has ended it is the first observation of the next episode, if autoreset
        is "same_step".
      reward: float64 `[n]`.
      terminated: bool `[n]`; the env reached a terminal state.
      truncated: bool `[n]`; the episode was cut off.
      valid: bool `[n]`; False for transitions that must not be used for training,
        because the env, its worker or its server failed; see `status`.
      final_observation: `[n, ...]`; the last observation of each episode that ended in
        this step. All other rows are zero, or unchanged if `out` is used. If a fault
        ended the episode, ignore its final observation: it may come from a step that
        was never returned, or may not belong to this episode at all.
      status: uint8 `[n]`; see `envserve.client.Status`. An episode that a fault ends
        has one last, truncated row, whose status is the reason. That row is returned
        once the env is available again, possibly after PENDING rows. The actions of
        PENDING rows are ignored and nothing happens in them, but their observation may
        be from the lost step. A LATE row continues the episode; it is the result of an
        action that was sent before the padding.
      infos: A dict from env indices to info dicts, by default only for rows whose
        episode has ended. A fault is stored in the info dict under the key "fault".
    """

    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    valid: Array
    final_observation: Any
    status: Array
    infos: Mapping[int, Mapping[str, Any]]

    @property
    def lost(self) -> Array:
        """Rows whose episode was ended by a fault, bool `[n]`."""
        lost: Array = self.truncated & ~self.valid & (self.status != LATE)
        return lost

    def __repr__(self) -> str:
        """Return the number of rows of each kind, and the shape of the observation."""
        if not isinstance(self.valid, np.ndarray):  # tensors, which may be symbolic
            return f"StepResult{tuple(self)!r}"
        return (
            f"<StepResult: {len(self.reward)} rows, {int(self.valid.sum())} valid, "
            f"{int(self.terminated.sum())} terminated, {int(self.truncated.sum())} "
            f"truncated, {len(self.infos)} with infos; observation "
            f"{_shape_of(self.observation)}>"
        )


def _shape_of(value: Any) -> str:
    """Describe a batch of observations, for example as "float32[64, 4]"."""
    if isinstance(value, Mapping):
        parts = (f"{key}: {_shape_of(part)}" for key, part in value.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype}{[*value.shape]}"
    # The parts of a batch of Tuples are batches. Other tuples have one value per row.
    if isinstance(value, tuple) and all(
        isinstance(part, np.ndarray | Mapping | tuple) for part in value
    ):
        return f"({', '.join(map(_shape_of, value))})"
    return f"{len(value)} values"


#: `StepResult._make` without the cost of its length check and Python call.
_make_result: Final[Callable[[tuple[Any, ...]], StepResult]] = partial(
    tuple.__new__, StepResult
)


def check_out(spec: EnvSpec, out: StepResult, num_rows: int) -> None:
    """Check that a step of `num_rows` rows can be written into `out`.

    Call this before the envs are stepped, because a later error would lose the result
    of their step.

    Raises:
      SpaceError: The observations are not nested like the observation space.
      ValueError: An array has a wrong shape, or the observations have no fixed shape.
    """
    if spec.has_encoded_observations:
        raise ValueError(
            "out: expected None, because the values of Text, Sequence, Graph or "
            "OneOf spaces cannot be written into existing arrays"
        )
    if len(out.reward) != num_rows:
        raise ValueError(
            f"out: expected arrays of {num_rows} rows; got {len(out.reward)}"
        )
    space, single = spec.observation_space, spec.single_observation
    for value in (out.observation, out.final_observation):
        arrays = flatten(space, value) if single is None else [value]
        for array, leaf in zip(arrays, spec.observation_leaves, strict=True):
            # NumPy would broadcast a single row to a larger array without an error.
            if array.shape != (shape := (num_rows, *leaf.shape)):
                raise _shape_error(array, shape)
    for array in (out.reward, out.terminated, out.truncated, out.valid, out.status):
        if array.shape != (num_rows,):
            raise _shape_error(array, (num_rows,))


def gather_result(
    spec: EnvSpec,
    row_set: RowSet,
    infos: Mapping[int, Mapping[str, Any]],
    out: StepResult | None = None,
) -> StepResult:
    """Copy the rows of the lanes into a result of `len(row_set)` rows.

    The arrays of `out`, which `check_out` has checked, are overwritten. If it is None,
    new arrays are allocated.
    """
    if out is not None or len(row_set.lane_parts) > 1:
        return _write_to(row_set, out or _allocate(spec, len(row_set)), infos, spec)
    # This runs at every step, and `copy` is the fastest way to make an array; see the
    # decision "A step makes few Python calls and few copies".
    part, _ = row_set.lane_parts[0]
    rows = part.view or part.read()
    observation: Any = []
    final: Any = []
    for leaf in rows.observation:
        observation.append(leaf.copy())
        final.append(_zeros(leaf))
    valid = row_set.all_valid.copy()
    # Any nonzero flag means that an episode has ended or that a status is not OK.
    if rows.flags.tobytes() != 3 * row_set.no_flags:
        np.equal(rows.status, OK, out=valid)
        _write_final(rows, final)
    if spec.single_observation is not None:
        (observation,), (final,) = observation, final
    else:
        observation = unflatten(spec.observation_space, observation)
        final = unflatten(spec.observation_space, final)
    return _make_result(
        (
            observation,
            rows.reward.copy(),
            rows.terminated.copy(),
            rows.truncated.copy(),
            valid,
            final,
            rows.status.copy(),
            infos,
        )
    )


def decode_result(
    spec: EnvSpec,
    result: StepResult,
    env_indices: Sequence[int] | Array,
    host_of: Callable[[int], str],
) -> StepResult:
    """Return a complete result with its variable-length observations decoded."""
    is_complete = result.status == OK
    decode = partial(
        decode_observation, spec, env_indices, is_complete=is_complete, host_of=host_of
    )
    ended = result.terminated | result.truncated
    last = decode(result.final_observation, ended=ended)
    observation = decode(result.observation)
    return result._replace(observation=observation, final_observation=last)


def _write_to(
    row_set: RowSet,
    out: StepResult,
    infos: Mapping[int, Mapping[str, Any]],
    spec: EnvSpec,
) -> StepResult:
    space, is_nested = spec.observation_space, spec.single_observation is None
    observation = flatten(space, out.observation) if is_nested else [out.observation]
    targets = (*observation, out.reward, out.terminated, out.truncated, out.status)
    for target, sources in zip(targets, row_set.sources(), strict=True):
        if len(sources) == 1:
            target[...] = sources[0]
        else:  # one NumPy call copies from any number of lanes
            np.concatenate(sources, out=target, casting="unsafe")
    # As in `gather_result`, comparing bytes is faster than NumPy calls.
    ends = np.logical_or(out.terminated, out.truncated).tobytes()
    is_complete = out.status.tobytes() == row_set.no_flags
    out.valid[...] = True if is_complete else out.status == OK
    if ends != row_set.no_flags:
        final = out.final_observation
        leaves = flatten(space, final) if is_nested else [final]
        for part, set_rows in row_set.lane_parts:
            if 1 in ends[set_rows]:
                _write_final(part.read(), [leaf[set_rows] for leaf in leaves])
    return out._replace(infos=infos) if out.infos or infos else out


def final_observations(
    space: Space[Any], step: StepResult, previous: Any
) -> dict[int, Any]:
    """Return the final observation of each row whose episode has ended, by row.

    The `previous` observations, from before the step, replace the final observations of
    episodes that a fault has ended.
    """
    final = dict[int, Any]()
    ended = step.terminated | step.truncated
    for mask, batch in ((ended, step.final_observation), (step.lost, previous)):
        if rows := mask.nonzero()[0].tolist():
            final |= zip(rows, unbatch(space, batch, rows), strict=True)
    return final


def with_last_observation(space: Space[Any], step: StepResult, previous: Any) -> Any:
    """Return the observations of a step; after a fault, those before the step.

    The observations of the step may be overwritten.
    """
    pairs = zip(flatten(space, step.observation), flatten(space, previous), strict=True)
    leaves = []
    for current, previous_leaf in pairs:
        rows = current if isinstance(current, np.ndarray) else list(current)
        for row in step.lost.nonzero()[0].tolist():
            rows[row] = previous_leaf[row]
        leaves.append(rows if rows is current else tuple(rows))
    return unflatten(space, leaves)


def _shape_error(target: Array, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"out: expected an array of shape {list(shape)}; got {list(target.shape)}"
    )


def _write_final(rows: Rows, targets: Sequence[Array]) -> None:
    """Copy the final observations of rows whose episode has ended."""
    (ended,) = (rows.terminated | rows.truncated).nonzero()
    for target, source in zip(targets, rows.final_observation, strict=True):
        target[ended] = source.take(ended, axis=0)


def _zeros(like: Array) -> Array:
    """Return zeros; large arrays are mapped, so their pages cost time only if written.

    Most steps end no episode and write nothing to these arrays. With a separate
    mapping, the allocator can also reuse the freed memory of earlier observations for
    the next step, which avoids page faults.
    """
    if like.nbytes < _LARGE_BYTES:
        return np.zeros(like.shape, like.dtype)
    # MAP_PRIVATE, because the kernel merges adjacent private mappings. Shared ones
    # would each count towards the limit of mappings per process.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.ndarray(like.shape, like.dtype, mmap.mmap(-1, like.nbytes, flags=flags))


def _allocate(spec: EnvSpec, num_rows: int) -> StepResult:
    space, leaves = spec.observation_space, spec.observation_leaves
    observation = [np.empty((num_rows, *leaf.shape), leaf.dtype) for leaf in leaves]
    return StepResult(
        unflatten(space, observation),
        np.empty(num_rows, np.float64),
        np.empty(num_rows, np.bool_),
        np.empty(num_rows, np.bool_),
        np.empty(num_rows, np.bool_),
        unflatten(space, [_zeros(leaf) for leaf in observation]),
        np.empty(num_rows, np.uint8),
        {},
    )


def add_infos(
    infos: RowInfos, outcome: Outcome, block: BatchBlock, raises_faults: bool
) -> EnvserveError | None:
    """Add the infos and faults of a block's step to `infos`; its keys are env indices.

    Returns:
      The error to raise, if any: the error of the whole block, or the first fault that
      is raised. With `raises_faults`, every fault is raised; otherwise, only faults of
      envs that returned a value outside their spaces are raised.
    """
    error = None if outcome.error is None else block.located(outcome.error)
    infos.add(outcome.infos, block.offset)
    for fault in outcome.faults:
        env_index = fault.env_index + block.offset
        text = {"status": fault.status.name, "text": fault.text}
        infos.others[env_index] = {"fault": text}
        if error is None and (fault.is_violation or raises_faults):
            error = EnvError(
                f"Env {env_index} ({block.lane.name}): {fault.cause}",
                env_index=env_index,
                remote_traceback=fault.detail,
            )
    return error
