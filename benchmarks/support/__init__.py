"""Helpers for benchmarks and fault injection: the machine, processes, tables."""
