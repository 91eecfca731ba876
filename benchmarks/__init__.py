"""Benchmarks against other projects, run by `scripts/bench.py`.

Python runs the `__init__.py` files in all workers that import `benchmarks.cases.envs`,
so these files contain no code.
"""
