"""Use trained policies: evaluation, export, videos, learning curves."""
