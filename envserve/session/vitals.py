"""How the process that serves is, as far as its clients are told."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Vitals"]


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """What an orchestrator asks for.

    Attributes:
      is_starting: Whether workers cannot be started yet.
      loop_lag_seconds: How late the serving loop was lately, at worst.
    """

    is_starting: bool = False
    loop_lag_seconds: float = 0.0
