"""The owner's side of one host's workers: started, watched, asked, replaced.

`pool` is what servers and lanes use; nothing is imported here, since starting is
quicker the less a process has loaded.
"""

__all__: list[str] = []
