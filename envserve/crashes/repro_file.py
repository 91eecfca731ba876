"""What a repro file holds: an env, what it has been through, and how it ended.

The file is one value in `codec`'s encoding, so reading it runs no code; whatever is in
it is checked before it is used, since files may come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from envserve.crashes.action_ring import ActionHistory, Count
from envserve.errors import ReproError
from envserve.settings import Autoreset, NonFinite
from envserve.slab import Status
from envserve.spaces import codec
from envserve.wrappers.specs import WrapperSpec, plain_wrappers, wrappers_from_plain

__all__ = ["MAX_REPRO_BYTES", "End", "Repro", "decode_repro", "encode_repro"]

MAX_REPRO_BYTES: Final = 64 << 20
_FORMAT: Final = 3


@dataclass(frozen=True, kw_only=True)
class End:
    """How an env ended.

    Attributes:
      status: Kind of fault.
      text: The traceback, or how the worker died.
      exit_code: Of the worker, as of `os.waitstatus_to_exitcode`; None if it lives.
      is_violation: Whether the env broke its own spaces.
      stderr_tail: The end of what the worker has written to stderr.
    """

    status: Status
    text: str
    exit_code: int | None = None
    is_violation: bool = False
    stderr_tail: str = ""


@dataclass(frozen=True, kw_only=True)
class Repro:
    """All that is needed to see a fault again.

    Attributes:
      env_name: Registered name.
      env_kwargs: Plain arguments of its constructor.
      wrappers: What it was wrapped in.
      vectorized: Whether it was a row of a vector env, which cannot be played alone.
      nonfinite: See `settings.NonFinite`.
      strict_spaces: See `settings.EnvRequest`.
      import_modules: Modules that had been imported where it was built; for the
        reader to know of, never to import.
      autoreset: See `settings.Autoreset`.
      root_seed: Seed of the whole batch.
      seeded: Whether envs' first resets have got seeds.
      env_index: Row of the whole batch.
      timeout_seconds: How long the call that it ended in might take.
      played: How to get there; the fault is in the last action, or in the reset if
        there is none.
      end: How it ended.
    """

    env_name: str
    env_kwargs: Mapping[str, Any]
    import_modules: tuple[str, ...]
    autoreset: Autoreset
    root_seed: Count
    seeded: bool
    env_index: Count
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
    played: ActionHistory
    end: End
    wrappers: tuple[WrapperSpec, ...] = ()
    nonfinite: NonFinite = "raise"
    strict_spaces: bool = False
    vectorized: bool = False


def encode_repro(repro: Repro) -> bytes:
    """Returns the content of a file."""
    value = {
        "format": _FORMAT,
        **vars(repro),
        "wrappers": plain_wrappers(repro.wrappers),
        "played": vars(repro.played),
        "end": {**vars(repro.end), "status": int(repro.end.status)},
    }
    return codec.encode(value)


def decode_repro(data: bytes) -> Repro:
    """Reads the content of a file.

    Raises:
      ReproError: It is not one of ours, or not of this version.
    """
    try:
        value = codec.decode(data, max_bytes=MAX_REPRO_BYTES)
        if value["format"] != _FORMAT:
            raise ReproError(
                f"expected a repro file of format {_FORMAT}; "
                f"got {value['format']!r}; replay it with the version that wrote it"
            )
        wrappers = wrappers_from_plain(value.pop("wrappers"))
        repro = msgspec.convert(value, Repro, dec_hook=_array)
        if len({len(array) for array in repro.played.actions}) != 1:
            raise ValueError("expected as many actions in each array")
    except ReproError:
        raise
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise ReproError(
            f"expected a repro file of envserve; got something else: {error!r}"
        ) from None
    return replace(repro, wrappers=wrappers)


def _array(_: type, value: Any) -> Any:
    if not isinstance(value, np.ndarray) or not value.ndim:
        raise ValueError("expected an array of actions")
    return value
