"""Scores of the named configs over several seeds, compared with published scores.

`tasks` lists the tasks, `run_one` performs one run, `many` performs all missing runs,
and `document` writes the tables and the plot. The command is
`scripts/benchmark_scores.py`.
"""
