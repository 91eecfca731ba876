"""Helpers of benchmarks and fault injection: machine facts, processes, tables."""
