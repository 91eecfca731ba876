"""What a step of a batch gives, and how it is copied out of the lanes' rows."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector.utils import iterate

from envserve.client.row_set import BatchBlock, RowSet
from envserve.errors import EnvError, EnvserveError
from envserve.lane import Outcome
from envserve.slab import Rows, Status
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.leaves import flatten, unflatten
from envserve.spaces.variable_length import decode_observation

Array = np.ndarray[Any, Any]

_LARGE_BYTES: Final = 1 << 16
_OK: Final = int(Status.OK)  # NumPy takes long to see a number in an enum
_LATE: Final = int(Status.LATE)
_any: Final = np.logical_or.reduce


class StepResult(NamedTuple):
    """What a step of n envs gave. Observations are nested as their space.

    Attributes:
      observation: `[n, ...]`, in the dtypes of the observation space. Where an
        episode ended, the first observation of the next one.
      reward: float64 `[n]`.
      terminated: bool `[n]`; the episode reached an end of its own.
      truncated: bool `[n]`; the episode was cut off.
      valid: bool `[n]`; False for a transition that is not to be learned from, since
        the env, its worker or its server failed: see `status`.
      final_observation: `[n, ...]`; the last observation of an episode that ended in
        this step, zero (with `out`: untouched) in all other rows. Of a lost episode it
        may be of a step that was never answered, or of nothing that was played.
      status: uint8 `[n]`, see `envserve.client.Status`. A lost episode is one row
        that is `truncated`, with the reason for a status. It comes when the env is
        back, after any number of rows that are PENDING: their actions are not used, and
        nothing happens in them, but their observation may be of the step that was lost.
        A row that is LATE goes on with the episode, and its action is one of before
        the padding.
      infos: Info dict by env index, as far as there are any: by default those of
        steps that end an episode. Faults stand under the key "fault".
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
        """Rows that have lost their episode, bool `[n]`; see `final_observation`."""
        lost: Array = self.truncated & ~self.valid & (self.status != _LATE)
        return lost

    def __repr__(self) -> str:
        """Shows how many rows there are of what, and the observation's shape."""
        return (
            f"<StepResult: {len(self.reward)} rows, {int(self.valid.sum())} valid, "
            f"{int(self.terminated.sum())} terminated, {int(self.truncated.sum())} "
            f"truncated, {len(self.infos)} with infos; observation "
            f"{_shape_of(self.observation)}>"
        )


def _shape_of(value: Any) -> str:
    """Describes a batch of observations, such as "float32[64, 4]"."""
    if isinstance(value, Mapping):
        parts = (f"{key}: {_shape_of(part)}" for key, part in value.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype}{[*value.shape]}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shape_of, value))})"
    return f"{len(value)} values"


#: `StepResult._make` without its check of the length, and a call of Python.
_make_result: Final[Callable[[tuple[Any, ...]], StepResult]] = partial(
    tuple.__new__, StepResult
)


def gather_result(
    spec: EnvSpec,
    row_set: RowSet,
    infos: Mapping[int, Mapping[str, Any]],
    out: StepResult | None = None,
) -> StepResult:
    """Copies what is in lanes' rows, to arrays `[len(row_set), ...]` of `out` if given.

    Raises:
      ValueError: An array of `out` has another shape.
    """
    if out is not None or len(row_set.pieces) > 1:
        return _write(row_set, out or _allocate(spec, len(row_set)), infos, spec)
    # Copying is the quickest way to get an array, and this is done at every step; see
    # docs/decisions.md: "A step makes few Python calls and few copies".
    piece = row_set.pieces[0]
    rows = piece.view or piece.read()
    terminated, truncated = rows.terminated.copy(), rows.truncated.copy()
    observation: Any = []
    final: Any = []
    for leaf in rows.observation:
        observation.append(leaf.copy())
        final.append(_zeros(leaf))
    if _any(terminated) or _any(truncated):
        _write_final(rows, final)
    leaves = spec.observation_leaves
    if leaves and leaves[0].space is spec.observation_space:
        (observation,), (final,) = observation, final
    else:
        observation = unflatten(spec.observation_space, observation)
        final = unflatten(spec.observation_space, final)
    return _make_result(
        (
            observation,
            rows.reward.copy(),
            terminated,
            truncated,
            rows.status == _OK,
            final,
            rows.status.copy(),
            infos,
        )
    )


def decode_result(
    spec: EnvSpec, result: StepResult, env_indices: Sequence[int] | Array
) -> StepResult:
    """Makes values of what is encoded, once nothing more is written to the rows."""
    decode = partial(
        decode_observation, spec, env_indices, is_complete=result.status == _OK
    )
    ended = result.terminated | result.truncated
    last = decode(result.final_observation, ended=ended)
    return result._replace(
        observation=decode(result.observation), final_observation=last
    )


def _write(
    row_set: RowSet,
    out: StepResult,
    infos: Mapping[int, Mapping[str, Any]],
    spec: EnvSpec,
) -> StepResult:
    space = spec.observation_space
    observation = flatten(space, out.observation)
    if len(out.reward) != len(row_set):
        raise ValueError(
            f"out: expected arrays of {len(row_set)} rows; got {len(out.reward)}"
        )
    pieces = [piece.read() for piece in row_set.pieces]
    leaves = zip(*[rows.observation for rows in pieces], strict=True)
    names = ("reward", "terminated", "truncated", "status")
    others = [(getattr(out, n), [getattr(rows, n) for rows in pieces]) for n in names]
    for target, sources in (*zip(observation, leaves, strict=True), *others):
        _check_shape(target, (len(row_set), *sources[0].shape[1:]))
        if len(sources) > 1:  # one call, however many servers there are
            np.concatenate(sources, out=target, casting="unsafe")
        else:
            target[:] = sources[0]
    out.valid[:] = out.status == _OK
    ended = np.logical_or(out.terminated, out.truncated)
    final = flatten(space, out.final_observation) if ended.any() else []
    for piece, rows in zip(row_set.pieces, pieces, strict=True):
        if final and ended[piece.set_rows].any():
            _write_final(rows, [leaf[piece.set_rows] for leaf in final])
    return out._replace(infos=infos) if out.infos or infos else out


def last_rows(space: Space[Any], step: StepResult, seen: Any) -> list[Any]:
    """Returns what episodes that have ended showed last, by row.

    Of a lost one that is what was seen before the step; `space` is that of all rows.
    """
    rows = list(iterate(space, step.final_observation))
    if lost := step.lost.nonzero()[0].tolist():
        before = list(iterate(space, seen))
        for row in lost:
            rows[row] = before[row]
    return rows


def _check_shape(target: Array, shape: tuple[int, ...]) -> None:
    # NumPy would fill a larger array with copies of a single row.
    if target.shape != shape:
        raise ValueError(
            f"out: expected an array of shape {list(shape)}; got {list(target.shape)}"
        )


def _write_final(rows: Rows, targets: Sequence[Array]) -> None:
    """Copies the final observations of rows whose episode has ended."""
    (ended,) = (rows.terminated | rows.truncated).nonzero()
    for target, source in zip(targets, rows.final_observation, strict=True):
        _check_shape(target, source.shape)
        target[ended] = source[ended]


def _zeros(like: Array) -> Array:
    """Returns zeros; large ones cost next to nothing until they are written to.

    Most steps end no episode. Pages of their own also leave the allocator what it can
    give to the next step's observations, with no page faults.
    """
    if like.nbytes < _LARGE_BYTES:
        return np.zeros(like.shape, like.dtype)
    # Private: shared ones would each count as a mapping, of which there are few.
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
    infos: dict[int, Mapping[str, Any]],
    outcome: Outcome,
    block: BatchBlock,
    raises_faults: bool,
) -> EnvserveError | None:
    """Adds what a step of a block gave besides rows, by env index of the batch.

    Returns:
      What to raise: what failed as a whole, or the first fault that asks for it. Each
      does if `raises_faults`, and else those that broke the env's own spaces.
    """
    error = outcome.error
    for row, info in outcome.infos.items():
        infos[row + block.offset] = info
    for fault in outcome.faults:
        env_index = fault.env_index + block.offset
        infos[env_index] = {"fault": {"status": fault.status.name, "text": fault.text}}
        if error is None and (fault.is_violation or raises_faults):
            error = EnvError(
                f"Env {env_index} ({block.lane.name}): {fault.cause}",
                env_index=env_index,
                remote_traceback=fault.detail,
            )
    return error
