"""The content of repro files: an env, its history, and its failure.

A file is one value in `codec`'s encoding, so reading it never executes code. The value
is validated before it is used, because the file may come from another person.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from envserve.crashes.action_ring import ActionHistory, Count
from envserve.envs.context import EnvContext
from envserve.errors import ReproError
from envserve.settings import Autoreset, NonFinite, convert
from envserve.slab import Status
from envserve.spaces import codec
from envserve.text import one_line
from envserve.wrappers.specs import WrapperSpec, wrappers_from_plain, wrappers_to_plain

MAX_REPRO_BYTES: Final = 64 << 20
_FORMAT: Final = 3


@dataclass(frozen=True, kw_only=True)
class End:
    """The failure of an env.

    Attributes:
      status: Kind of fault.
      text: Traceback, or how the worker died.
      exit_code: Exit code of the worker as `os.waitstatus_to_exitcode` returns it; None
        if the worker is alive.
      is_violation: Whether the env returned a value outside its spaces.
      stderr_tail: The last lines that the worker wrote to stderr.
    """

    status: Status
    text: str
    exit_code: int | None = None
    is_violation: bool = False
    stderr_tail: str = ""


@dataclass(frozen=True, kw_only=True)
class Repro:
    """Everything that is needed to reproduce a fault.

    Attributes:
      env_name: Registered name of the env.
      env_kwargs: Keyword arguments of the env's constructor, in which placeholders such
        as "{row}" have not been replaced; see `EnvContext`.
      wrappers: Wrappers of the env, the innermost first.
      vectorized: Whether the env was a row of a vector env; such a row cannot be
        replayed alone.
      nonfinite: See `settings.NonFinite`.
      strict_spaces: See `settings.EnvRequest`.
      import_modules: Modules that the env's worker imported. A replay may name them in
        an error message, but does not import them.
      autoreset: See `settings.Autoreset`.
      root_seed: Seed of the whole batch.
      seeded: Whether the first reset of the env used the seed that is derived from
        `root_seed`; see `env_seed`.
      env_index: Index of the env in the whole batch.
      timeout_seconds: Time limit of the call in which the env failed.
      played: History of the env, which failed in the step with the last action, or in
        the reset if there are no actions.
      end: How the env failed.
      context: Row and worker of the env, which replace the placeholders in
        `env_kwargs`; None in files of older versions.
    """

    env_name: str
    env_kwargs: Mapping[str, Any]
    import_modules: tuple[str, ...]
    autoreset: Autoreset
    root_seed: Count
    seeded: bool
    env_index: Count
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0)]
    played: ActionHistory
    end: End
    wrappers: tuple[WrapperSpec, ...] = ()
    nonfinite: NonFinite = "raise"
    strict_spaces: bool = False
    vectorized: bool = False
    context: EnvContext | None = None


def encode_repro(repro: Repro) -> bytes:
    """Encode a repro as the content of a file."""
    value = {
        "format": _FORMAT,
        **vars(repro),
        "wrappers": wrappers_to_plain(repro.wrappers),
        "played": vars(repro.played),
        "end": {**vars(repro.end), "status": int(repro.end.status)},
        "context": repro.context and vars(repro.context),
    }
    return codec.encode(value, keep_types=True)


def decode_repro(data: bytes) -> Repro:
    """Decode the content of a repro file.

    Raises:
      ReproError: The content is invalid, or has a format that is not supported.
    """
    try:
        value = convert(codec.decode(data, max_bytes=MAX_REPRO_BYTES), dict)
        if value["format"] != _FORMAT:
            raise ReproError(
                f"expected a repro file of format {_FORMAT}; "
                f"got {value['format']!r:.100}; replay it with the envserve version "
                f"that wrote it"
            )
        wrappers = wrappers_from_plain(value.pop("wrappers"))
        repro = msgspec.convert(value, Repro, dec_hook=_decode_array)
        if len({len(array) for array in repro.played.actions}) != 1:
            raise ValueError("expected the same number of actions in each array")
    except ReproError:
        raise
    # msgspec raises AttributeError for an array where it expects a map.
    except (
        *(ValueError, KeyError, TypeError, AttributeError),
        msgspec.ValidationError,
    ) as error:
        text = one_line(f"{type(error).__name__}: {error}", 300)
        raise ReproError(f"not an envserve repro file: {text}") from None
    return replace(repro, wrappers=wrappers)


def _decode_array(_: type, value: Any) -> Any:
    if not isinstance(value, np.ndarray) or not value.ndim:
        raise ValueError("expected an array of actions")
    return value
