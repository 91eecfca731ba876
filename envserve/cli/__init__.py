"""The commands of `envserve`; `cli` puts them together.

What takes long to load is imported once a command runs: `health` is asked every 2 s.
"""

__all__: list[str] = []
