"""The cost of a batch on many servers for the process that steps it."""
