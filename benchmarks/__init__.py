"""Benchmarks against other projects, run by `scripts/bench.py`; not shipped.

The `__init__.py` files contain no code, because workers import `benchmarks.cases.envs`,
and an import also runs the files of all packages above the module.
"""
