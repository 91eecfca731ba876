"""Spaces and the values in them: leaves, encodings, infos, checks."""
