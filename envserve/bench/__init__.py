"""Benchmarks: `envserve bench`, and what its sub-commands are made of.

This file stays empty on purpose: workers import `envserve.bench.envs`, and importing
any module runs the files of its packages.
"""
