"""A block that is one `gymnasium.vector.VectorEnv`, stepped in a single call.

The `vector_entry_point` of a registered env builds the vector env. Values are checked
as in `env_block`, for all rows of the block at once. Therefore, a fault ends the
episodes of all these rows, and the vector env is rebuilt.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium.spaces import Tuple
from gymnasium.vector import AutoresetMode

from envserve.crashes.action_ring import ActionRing
from envserve.envs.registry import find_spec, parameters_of
from envserve.envs.seeding import env_seed
from envserve.errors import EnvStartError, UnknownEnv
from envserve.lane import Fault
from envserve.slab import FIRST_STEP, Rows, Status, next_beat
from envserve.spaces import codec
from envserve.spaces.env_spec import EnvSpec
from envserve.spaces.infos import copy_info
from envserve.spaces.leaves import Array, is_finite, unflatten
from envserve.worker import step_timings
from envserve.worker.attribute_calls import CallRequest, run_call_on_vector_env
from envserve.worker.channel import BuildMessage
from envserve.worker.env_checks import (
    EnvChecks,
    SpaceViolation,
    check_rebuilt,
    convert_leaf,
    flatten_observation,
    leaf_label,
    split_reset_result,
    step_result_violation,
)
from envserve.worker.env_row import NO_OPTIONS
from envserve.worker.rendering import prepare_rendering, render
from envserve.worker.worker_report import encode_report, fault_from_error

_Infos = Mapping[str, Any]
_Seeds = Sequence[int | None]

_COLUMNS: Final = ("reward", "terminated", "truncated")
_NO_INFOS: Final[_Infos] = {}
#: A fault of a vector env is reported for each of its rows. Only the first row gets the
#: whole text; the other rows get a summary of at most this length.
_MAX_SUMMARY_CHARS: Final = 96
_FINAL_OBS_MISSING: Final = (
    "expected infos['final_obs'] with the last observations of the ended episodes, "
    "because the vector env resets in mode SAME_STEP; got none; add them in step, or "
    "do not reset in step, and implement mode DISABLED; see 'Serve batched simulators' "
    "in the docs"
)
#: Keys of a SAME_STEP env's infos that describe the ended episodes.
_FINAL_KEYS: Final = frozenset({"final_obs", "final_info", "_final_obs", "_final_info"})


class VectorBlock:
    """The rows of a block, and the vector env that steps them.

    Attributes:
      rows: Rows of the pool.
    """

    def __init__(self, config: BuildMessage, rows: range, checks: EnvChecks) -> None:
        """Store the arguments; `build` builds the vector env."""
        self.rows = rows
        self._config = config
        self._checks = checks
        self._encode_report = partial(encode_report, len(rows), config.max_infos_kib)
        self._all_mask = np.ones(len(rows), np.bool_)
        self._incarnation = config.incarnations[rows.start]
        self._beat = 0
        #: Rows whose next step only resets them, because autoreset is "next_step".
        self._deferred: Array | None = None
        #: Attributes that clients have set, to be restored in a rebuilt env.
        self._attributes: dict[str, Any] = {}

    @property
    def _seeds(self) -> list[int | None]:
        root, first = self._config.seed, self._config.first_env_index
        return [env_seed(root, first + row, self._incarnation) for row in self.rows]

    def build(self) -> Iterator[tuple[int, EnvSpec]]:
        """Build the vector env; yield its first row in the batch, and its spec."""
        yield self._config.first_env_index + self.rows.start, self._make_env()

    def _make_env(self) -> EnvSpec:
        """Build the vector env and return its spec; the first reset uses `_seeds`."""
        name, autoreset = self._config.env_name, self._config.autoreset
        env = self._env = _make_vector_env(self._config, self.rows)
        mode = _autoreset_mode_of(env, name)
        self._accepts_reset_mask = env.metadata.get(
            "reset_mask", mode.name == "DISABLED"
        )
        self._resets_itself = mode.name == "SAME_STEP"
        modes = {"same_step", "disabled"} if self._accepts_reset_mask else set()
        supported = sorted(modes | {mode.name.lower()})
        if autoreset not in supported:
            raise EnvStartError(
                f"expected autoreset={' or '.join(supported)} (autoreset_mode of "
                f"make_vec), because the vector env of {name} resets in mode "
                f"{mode.name}; got {autoreset}"
            )
        self._resets_ended = autoreset == "same_step" and not self._resets_itself
        parameters = parameters_of(env.reset)
        if parameters is not None and not (
            {"seed", "options"} <= parameters.keys()
            or any(param.kind is param.VAR_KEYWORD for param in parameters.values())
        ):
            raise EnvStartError(
                f"expected reset(*, seed=None, options=None) of the vector env of "
                f"{name}; got reset({', '.join(parameters)})"
            )
        seed = (parameters or {}).get("seed")
        self._accepts_seed_list = "list" in str(seed and seed.annotation).lower()
        self._is_fresh, self._step_kind = True, FIRST_STEP
        spec = self._spec = EnvSpec(
            name, env.single_observation_space, env.single_action_space
        )
        leaves = spec.observation_leaves + spec.action_leaves
        if any(leaf.is_encoded for leaf in leaves):
            raise EnvStartError(
                f"expected a vector env whose spaces consist of arrays; got {spec}"
            )
        return spec

    def attach(self, rows: Rows, heartbeat: memoryview, ring: ActionRing) -> None:
        """Set the arrays, the heartbeat and the action ring to write to."""
        start, stop = self.rows.start, self.rows.stop
        block = self._block = rows.at(slice(start, stop))
        self._final_and_last = [
            *zip(block.final_observation, block.observation, strict=True)
        ]
        self._heartbeat = heartbeat
        self._record_step = ring.step_recorder(rows.action, start, stop)
        self._records = [ring.row_record(number) for number in self.rows]

    def close(self) -> None:
        """Close the env; suppress its exceptions."""
        with contextlib.suppress(BaseException):  # some windows call `sys.exit`
            self._env.close()

    def step(self) -> bytes:
        """Step all rows with the actions in the slab; return the encoded report."""
        began_at = step_timings.start_time(self._heartbeat)
        self._record_step()
        self._block.status[...] = Status.OK
        faults, infos = [], {}
        try:
            infos = self._step()
        except Exception as error:
            cause = step_result_violation(error) or error
            faults = self._replace_failed(cause, in_step=True)
        step_timings.record_step(self._heartbeat, began_at, len(self.rows))
        return self._encode_report(faults, infos, self._checks.take_warnings())

    def _step(self) -> dict[int, _Infos]:
        rows, spec = self._block, self._spec
        if self._deferred is not None and self._deferred.all():
            infos = self._reset(None, self._all_mask)
            rows.reward[...] = 0.0
            rows.flags[...] = 0
            return self._infos_by_row(infos, rows.truncated, _NO_INFOS)
        actions = [array.copy() for array in rows.action]  # envs may store actions
        self._write_heartbeat(self._step_kind)
        results = self._env.step(unflatten(spec.action_space, actions))
        self._step_kind = self._heartbeat[1] = 0
        observation, rewards, terminated, truncated, infos = results
        _check_infos("infos", infos)
        self._write_observation(rows.observation, observation)
        columns = rows.reward, rows.terminated, rows.truncated
        values = rewards, terminated, truncated
        for name, target, value in zip(_COLUMNS, columns, values, strict=True):
            array = np.asarray(value)
            if array.shape != target.shape or array.dtype.kind not in "biuf":
                raise SpaceViolation(
                    f"expected {name} to be {[*target.shape]} numbers; got "
                    f"{array.dtype}{[*array.shape]}; fix the env"
                )
            self._write_array(name, target, array)
        if self._deferred is not None:
            return self._begin_deferred(copy_info(infos))
        ended = rows.terminated | rows.truncated
        reset_infos = _NO_INFOS
        if ended.any():
            if self._resets_itself:
                if (finals := infos.get("final_obs")) is None:
                    raise SpaceViolation(_FINAL_OBS_MISSING)
                space, types = spec.observation_space, (list, tuple)
                is_array = isinstance(finals, np.ndarray) and finals.dtype.hasobject
                is_list = isinstance(finals, types) and not isinstance(space, Tuple)
                if (is_array or is_list) and len(finals) == len(ended):
                    observations = [*compress(finals, ended)]
                    if any(observation is None for observation in observations):
                        raise SpaceViolation(_FINAL_OBS_MISSING)
                    leaves = (flatten_observation(space, each) for each in observations)
                    finals = unflatten(space, zip(*leaves, strict=True))
                self._write_observation(rows.final_observation, finals, ended)
                if self._config.autoreset == "disabled":
                    # The caller will reset these rows: hide the new episodes.
                    for final, last in self._final_and_last:
                        last[ended] = final[ended]
            else:
                for final, last in self._final_and_last:
                    final[ended] = last[ended]
            if self._resets_ended:
                infos = copy_info(infos)
                reset_infos = self._reset(None, ended)
            else:
                self._record_resets(ended)
        if not (infos or reset_infos):
            return {}
        return self._infos_by_row(infos, ended, reset_infos)

    def _begin_deferred(self, infos: _Infos) -> dict[int, _Infos]:
        """Reset the deferred rows after a step, and return the infos by row.

        The step has also stepped these rows, because it always steps the whole vector
        env. The result of their reset replaces the result of the step.
        """
        rows, deferred = self._block, self._deferred
        assert deferred is not None, "the caller has checked this"
        # Without seeds, because some vector envs accept no seeds with a reset mask. The
        # reset that seeded the new env has already seeded these rows.
        reset_infos = self._reset(None, deferred)
        for array in (rows.reward, rows.terminated, rows.truncated):
            array[deferred] = 0
        ended = rows.terminated | rows.truncated
        for final, last in self._final_and_last:
            final[ended] = last[ended]
        self._record_resets(ended)
        by_row = self._infos_by_row(infos, ended, _NO_INFOS)
        reset_by_row = self._infos_by_row(reset_infos, np.zeros_like(ended), _NO_INFOS)
        for position in deferred.nonzero()[0].tolist():
            row = self.rows[position]
            by_row.pop(row, None)
            if row in reset_by_row:
                by_row[row] = reset_by_row[row]
        return dict(sorted(by_row.items()))

    def _infos_by_row(
        self, infos: _Infos, ended: Array, reset_infos: _Infos
    ) -> dict[int, _Infos]:
        """Split the infos of a step into one dict per row.

        Args:
          infos: Infos of the step.
          ended: Rows whose episode has ended, bool `[num_rows]`.
          reset_infos: Infos of the reset that followed within the step; may be empty.
        """
        reported = {"all": self._all_mask, "episode_end": ended}.get(self._config.infos)
        finals, size = infos.get("final_info", {}), len(self.rows)
        is_same_step = self._config.autoreset == "same_step"
        infos = {key: infos[key] for key in infos if key not in _FINAL_KEYS}
        by_row: dict[int, _Infos] = {}
        for position in [] if reported is None else reported.nonzero()[0].tolist():
            info = _row_info(infos, position, size)
            reset_info = _row_info(reset_infos, position, size)
            if self._resets_itself and ended[position]:
                _check_infos("infos['final_info']", finals)
                info, reset_info = _row_info(finals, position, size), info
            has_reset_info = bool(reset_info) or "reset_info" in info
            if is_same_step and ended[position] and has_reset_info:
                info["reset_info"] = reset_info
            if info:
                by_row[self.rows[position]] = info
        return by_row

    def reset(self, payload: bytes) -> bytes:
        """Reset some or all rows; return the encoded report; see `EnvBlock.reset`."""
        request = codec.decode(payload) if payload else {}
        reset_rows = request.get("rows")
        if reset_rows == []:
            self._deferred = self._all_mask
            return self._encode_report()
        reset_rows = reset_rows or [*self.rows]
        row_seeds, options = request.get("seeds"), request.get("options", b"")
        seed_of = dict(
            zip(reset_rows, row_seeds or [None] * len(reset_rows), strict=True)
        )
        seeds = [seed_of.get(row) for row in self.rows] if row_seeds else None
        mask = np.isin(self.rows, reset_rows)
        rows, faults, infos = self._block, [], _NO_INFOS
        try:
            infos = self._reset(seeds, mask, options)
        except Exception as error:
            if mask.all() and not row_seeds and options in NO_OPTIONS:
                raise  # not even a plain reset succeeds, so restart the worker
            faults, mask = self._replace_failed(error), self._all_mask
        rows.reward[mask] = 0.0
        rows.flags[:, mask] = 0  # no end of an episode, and status OK
        start, size = self.rows.start, len(self.rows)
        reported = sorted(reset_rows) if infos and self._config.infos == "all" else ()
        pairs = ((row, _row_info(infos, row - start, size)) for row in reported)
        by_row = {row: info for row, info in pairs if info}
        return self._encode_report(faults, by_row, self._checks.take_warnings())

    def _reset(self, seeds: _Seeds | None, mask: Array, options: bytes = b"") -> _Infos:
        """Reset some rows, write their first observations, and return the infos.

        Args:
          seeds: A seed or None for each row of the block; None for no seeds.
          mask: Rows to reset, bool `[num_rows]`. A new vector env is always reset as a
            whole, but only the observations of these rows are written.
          options: See `lane.Reset`.
        """
        is_full, written = bool(mask.all()), mask
        if not is_full and not self._accepts_reset_mask:
            raise EnvStartError(
                f"expected a reset of all {len(mask)} rows of a block, because their "
                f"vector env does not support reset_mask; got a reset of {mask.sum()}"
            )
        if self._is_fresh:
            if self._config.seeded:
                triples = zip(mask, seeds or self._seeds, self._seeds, strict=True)
                seeds = [
                    given if is_reset else default
                    for is_reset, given, default in triples
                ]
            is_full, mask = True, self._all_mask
        self._is_fresh = False
        self._write_heartbeat(1)
        self._record_resets(mask, seeds, options)
        seed: Any = seeds
        if seeds is not None and not self._accepts_seed_list:
            seed = next((seed for seed in seeds if seed is not None), None)
        env_options = codec.decode(options) if options else {}
        if not is_full:
            env_options["reset_mask"] = mask.copy()  # the env may change it
        began_at = step_timings.start_time()
        result = self._env.reset(seed=seed, options=env_options or None)
        step_timings.record_resets(self._heartbeat, began_at, int(mask.sum()))
        observation, infos = split_reset_result(result)
        self._write_observation(self._block.observation, observation, written)
        if self._deferred is not None:
            remaining = self._deferred & ~written
            self._deferred = remaining if remaining.any() else None
        self._heartbeat[1] = 0
        return infos

    def _record_resets(
        self, mask: Array, seeds: _Seeds | None = None, options: bytes = b""
    ) -> None:
        is_autoreset = seeds is None and not options
        for row in mask.nonzero()[0].tolist():
            record, incarnation = self._records[row], self._incarnation
            seed = None if seeds is None else seeds[row]
            record.begin_episode(
                None, incarnation, seed, None, options, is_autoreset=is_autoreset
            )

    def _write_heartbeat(self, call_kind: int) -> None:
        """Write the next heartbeat and the kind of the env call; see `Slab`."""
        self._beat = self._heartbeat[0] = next_beat(self._beat, self.rows.start)
        self._heartbeat[1] = call_kind

    def _replace_failed(
        self, error: Exception, *, in_step: bool = False
    ) -> list[Fault]:
        """Replace the failed vector env and return its faults; see `EnvBlock`."""
        first = fault_from_error(self.rows.start, error)
        summary = first.cause[:_MAX_SUMMARY_CHARS]
        others = (first._replace(env_index=row, text=summary) for row in self.rows[1:])
        for final, last in self._final_and_last:
            final[...] = 0 if isinstance(error, SpaceViolation) else last
        self._block.status[...] = Status.PENDING
        for record in self._records:
            record.save_failed_record()
        self._write_heartbeat(1)
        self.close()
        gc.collect()  # free the memory of earlier vector envs with reference cycles
        self._incarnation += 1
        spec, number = self._spec, self._config.first_env_index + self.rows.start
        check_rebuilt(number, spec, self._make_env(), self._config)
        for name, value in self._attributes.items():
            setattr(self._env, name, copy.deepcopy(value))
        is_deferred = in_step and self._config.autoreset == "next_step"
        self._deferred = self._all_mask if is_deferred else None
        if not is_deferred:
            self._reset(None, self._all_mask)
        elif isinstance(error, SpaceViolation):  # the rows may contain NaN
            for _, last in self._final_and_last:
                last[...] = 0
        self._heartbeat[1] = 0
        return [first, *others]

    def render(self, row: int) -> Any:
        """Render all envs of the vector env, and return the frame of one of them."""
        return render(self._env)[row - self.rows.start]

    def call(self, payload: bytes) -> bytes:
        """Call, get or set an attribute of the vector env; return an encoded reply."""
        request = CallRequest.decode(payload)
        self._write_heartbeat(1)
        for record in self._records if request.may_change_env else ():
            record.mark_touched()
        reply = run_call_on_vector_env(request, self._env, self.rows, self._attributes)
        self._heartbeat[1] = 0
        return reply

    def _write_observation(
        self, target: Sequence[Array], observation: Any, mask: Array | None = None
    ) -> None:
        """Write observations of the rows in the mask, or of all rows."""
        values = flatten_observation(self._spec.observation_space, observation)
        env_class = type(self._env)
        count = len(self.rows) if mask is None else int(mask.sum())
        for leaf, array, value in zip(
            self._spec.observation_leaves, target, values, strict=True
        ):
            if count < len(value) == len(self.rows):
                value = np.asarray(value)[mask]
            leaf_of_all = replace(leaf, shape=(count, *leaf.shape))
            checked = convert_leaf(leaf_of_all, value, self._checks, env_class)
            self._write_array(leaf_label(leaf), array, checked, mask)

    def _write_array(
        self, label: str, target: Array, array: Array, mask: Array | None = None
    ) -> None:
        if not is_finite(array):
            self._checks.check_finite(f"{label} to be finite", array)
        target[... if mask is None else mask] = array


def _make_vector_env(config: BuildMessage, rows: range) -> Any:
    if config.spare_envs:
        raise EnvStartError("vector envs do not support spare_envs; remove it")
    if names := ", ".join(wrapper.name for wrapper in config.wrappers):
        raise EnvStartError(f"vector envs do not support wrappers; remove {names}")
    if not isinstance(config.env_kwargs, Mapping):
        raise EnvStartError(
            "expected one map of env_kwargs for a vector env; got several"
        )
    name = config.env_name
    known = find_spec(name)
    if known.vector_entry_point is None:
        raise UnknownEnv(
            f"no env named {name!r} has a vector_entry_point; to use a VectorEnv "
            f"class, register it: gymnasium.register('MyEnv-v0', "
            f"vector_entry_point='my_module:MyVectorEnv')"
        )
    context = config.context_of(rows.start, config.worker, config.num_workers)
    mode, kwargs = "vector_entry_point", context.arguments(config.env_kwargs)
    prepare_rendering(kwargs)
    return context.run(
        lambda: gymnasium.make_vec(known, len(rows), vectorization_mode=mode, **kwargs)
    )


def _autoreset_mode_of(env: Any, name: str) -> AutoresetMode:
    """Return a vector env's autoreset mode; raise EnvStartError if it has none."""
    mode = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError:
        raise EnvStartError(
            f"expected metadata['autoreset_mode'] of the vector env of {name} to be "
            f"AutoresetMode.NEXT_STEP, SAME_STEP (its step resets ended envs, and puts "
            f"the last observations into infos['final_obs']) or DISABLED (its reset "
            f"takes reset_mask); got {mode!r}; see 'Serve batched simulators' in the "
            f"docs"
        ) from None


def _check_infos(name: str, infos: Any) -> None:
    if not isinstance(infos, Mapping):
        raise SpaceViolation(
            f"expected {name} to be a dict of arrays; got {type(infos).__name__}; "
            "fix the env"
        )


def _row_info(infos: _Infos, position: int, size: int) -> dict[str, Any]:
    """Return the info of one row from the infos of a vector env (arrays with masks).

    The row is given by its position in the block, which has `size` rows.
    """
    info: dict[str, Any] = {}
    masks = {f"_{key}" for key in infos}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if key in masks or not (mask is None or mask[position]):
            continue
        if isinstance(value, Mapping):
            value = _row_info(value, position, size)
        elif (isinstance(value, list | tuple) and len(value) == size) or (
            getattr(value, "shape", ())[:1] == (size,)  # arrays of JAX, too
        ):
            column = np.asarray(value) if hasattr(value, "shape") else value
            value = column[position]
            # Gymnasium batches bools to an array of bools, and np.bool_ to objects.
            if getattr(column, "dtype", None) == np.bool_ and column.ndim == 1:
                value = bool(value)
        info[key] = value  # a value that is not split by row belongs to all rows
    return info
