"""Cases without TensorFlow: ours, the machine's limit, and other projects.

This file stays empty on purpose: workers import `benchmarks.cases.envs`, and importing
any module runs the files of its packages.
"""
