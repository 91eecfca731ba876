"""The commands of `ppo`, one per module; `ppo.cli.app` is the entry point."""
