"""Spaces and their values: leaves, encodings, infos and action checks."""
