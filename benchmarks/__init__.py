"""Benchmarks against other projects, run by `scripts/bench.py`; not in the package.

The `__init__.py` files contain no code, because workers import `benchmarks.cases.envs`,
which also runs the `__init__.py` of its parent packages.
"""
