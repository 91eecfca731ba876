"""How fast it is beside other projects; never shipped. See `scripts/bench.py`.

This file stays empty on purpose: workers import `benchmarks.envs`, and importing
any module runs the files of its packages.
"""
