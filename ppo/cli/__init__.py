"""The commands of `ppo`, one per file; `ppo.cli.app` puts them together."""
