"""What benchmarks and faults on purpose share: the machine, processes, tables.

This file stays empty on purpose: importing any module runs the files of its packages.
"""
