"""What the named configs reach, over many seeds, beside published scores.

`tasks` lists what is run; `run_one` runs one; `many` runs what is missing; `document`
makes a table and a plot of it. `scripts/benchmark_scores.py` is the way in.
"""
