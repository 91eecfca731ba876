"""How fast it is beside other projects; never shipped. See `scripts/bench.py`.

Packages in here stay empty on purpose: workers import `benchmarks.cases.envs`, and
importing any module runs the files of its packages.
"""
