"""`envserve demo`: watch envs learn while you inject faults."""
