"""What a repro file holds: an env, what it has been through, and how it ended.

The file is one value in `codec`'s encoding, so reading it runs no code; whatever is in
it is checked before it is used, since files may come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, get_args

import numpy as np

from envserve import codec
from envserve.errors import ReproError
from envserve.journal import Played
from envserve.lane import Autoreset
from envserve.slab import Status
from envserve.wrappers import WrapperSpec, plain_wrappers, wrappers_from_plain

__all__ = ["MAX_REPRO_BYTES", "End", "Repro", "decode_repro", "encode_repro"]

MAX_REPRO_BYTES: Final = 64 << 20
#: From 2 on, a file may name wrappers, which older readers would pass over.
_FORMAT: Final = 2
_UNWRAPPED_FORMAT: Final = 1


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
      import_modules: Modules that had been imported where it was built; for the
        reader to know of, never to import.
      autoreset: See `lane.Autoreset`.
      root_seed: Seed of the whole batch.
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
    root_seed: int
    env_index: int
    timeout_seconds: float
    played: Played
    end: End
    wrappers: tuple[WrapperSpec, ...] = ()


def encode_repro(repro: Repro) -> bytes:
    """Returns the content of a file."""
    value = {
        "format": _FORMAT if repro.wrappers else _UNWRAPPED_FORMAT,
        **_plain(repro),
        "wrappers": plain_wrappers(repro.wrappers),
        "played": _plain(repro.played),
        "end": {**_plain(repro.end), "status": int(repro.end.status)},
    }
    return codec.encode(value)


def decode_repro(data: bytes) -> Repro:
    """Reads the content of a file.

    Raises:
      ReproError: It is not one of ours, or not of this version.
    """
    try:
        value = codec.decode(data, max_bytes=MAX_REPRO_BYTES)
        if value["format"] not in (_FORMAT, _UNWRAPPED_FORMAT):
            raise ReproError(
                f"expected a repro file of format {_UNWRAPPED_FORMAT} or {_FORMAT}; "
                f"got {value['format']!r}; replay it with the version that wrote it"
            )
        played, end = value["played"], value["end"]
        autoreset = _checked(value, "autoreset", str)
        if autoreset not in get_args(Autoreset):
            raise ValueError(f"autoreset {autoreset!r}")
        return Repro(
            env_name=_checked(value, "env_name", str),
            env_kwargs={str(k): v for k, v in value["env_kwargs"].items()},
            wrappers=wrappers_from_plain(value.get("wrappers", [])),
            import_modules=tuple(str(name) for name in value["import_modules"]),
            autoreset=autoreset,
            root_seed=_count(value, "root_seed"),
            env_index=_count(value, "env_index"),
            timeout_seconds=_seconds(value, "timeout_seconds"),
            played=_decode_played(played),
            end=End(
                status=Status(end["status"]),
                text=_checked(end, "text", str),
                exit_code=None
                if end["exit_code"] is None
                else _checked(end, "exit_code", int),
                is_violation=_checked(end, "is_violation", bool),
                stderr_tail=_checked(end, "stderr_tail", str),
            ),
        )
    except ReproError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ReproError(
            f"expected a repro file of envserve; got something else: {error!r}"
        ) from None


def _decode_played(value: Any) -> Played:
    generator = value["generator"]
    if generator is not None:
        generator = tuple(int(number) for number in generator)
        if len(generator) != 6 or not all(0 <= n < 2**64 for n in generator):
            raise ValueError(f"generator {generator}")
    actions = tuple(value["actions"])
    if not actions or not all(isinstance(a, np.ndarray) and a.ndim for a in actions):
        raise ValueError("actions are no arrays")
    if len({len(array) for array in actions}) > 1:
        raise ValueError("actions of several lengths")
    return Played(
        incarnation=_count(value, "incarnation"),
        seed=None if value["seed"] is None else _count(value, "seed"),
        generator=generator,
        actions=actions,
        num_missing=_count(value, "num_missing"),
        episode_step=_count(value, "episode_step"),
        is_touched=_checked(value, "is_touched", bool),
    )


def _plain(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def _checked(value: Any, name: str, kind: type) -> Any:
    if type(value[name]) is not kind:
        raise TypeError(f"{name} {value[name]!r}")
    return value[name]


def _seconds(value: Any, name: str) -> float:
    number = float(value[name])
    if not 0 < number < 1e9:
        raise ValueError(f"{name} {number}")
    return number


def _count(value: Any, name: str) -> int:
    number: int = _checked(value, name, int)
    if not 0 <= number < 2**63:
        raise ValueError(f"{name} {number}")
    return number
