"""Record the history of each env, in shared memory and in repro files."""
