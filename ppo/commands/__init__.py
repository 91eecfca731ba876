"""What the `ppo` command shares and shows; `ppo.cli` is the command."""

__all__: list[str] = []
