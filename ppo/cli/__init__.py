"""The commands of `ppo`, one per file; `ppo.cli.app` puts them together."""

__all__: list[str] = []
