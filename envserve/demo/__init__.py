"""`envserve demo`: watch an agent learn while you inject faults."""
