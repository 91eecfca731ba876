"""What benchmarks and faults on purpose share: the machine, processes, tables."""
