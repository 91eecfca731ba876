"""The commands of `ppo`, one per file; `ppo.cli` puts them together."""

__all__: list[str] = []
