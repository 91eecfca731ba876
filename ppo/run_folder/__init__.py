"""Read and write the files of a run: its config, checkpoints and metrics."""
