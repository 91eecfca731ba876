"""Scores of the named configs over several seeds, compared with published scores.

`tasks` lists the runs, `run_one` runs one, `many` runs the missing ones, and `document`
writes the tables and the plot. `scripts/benchmark_scores.py` is the command.
"""
