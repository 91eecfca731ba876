"""Scores of the named configs over several seeds, compared with published scores.

`tasks` lists the tasks, `run_one` performs one run, `document` writes the tables and
the plot, and `command` is the command `scripts/benchmark_scores.py`, which performs all
missing runs.
"""
