"""The parent's side of the workers of one host: start, watch, use and replace them.

A `Pool` (`pool`) lives in the process that uses the envs: a trainer or a server. See
`envserve.worker` for the processes and the shared memory. From bottom to top:

- `launcher` has processes forked and killed by the template, and reports their exits.
- `supervisor` keeps one worker alive over all its processes: it starts it, kills it if
  it hangs or misbehaves, and restarts it with increasing delays. `worker_states`
  contains the states and events.
- `worker_set` contains all workers of a pool and the slab.
- `block_operations` tracks which operation runs on which block, and which blocks are
  lost. It turns the events of workers into outcomes.
- `pool` connects them to a selector and implements `lane.Lane`.

There are no threads. Commands go down as calls, events come up as return values, and
time is an argument. Except for closing and replacing them, nothing waits for a worker,
because one loop may serve many pools: writes are queued, and deadlines detect whatever
a worker fails to do.

A worker's process may die at any moment, and its messages may be wrong, because they
may be written by code of an env. Three rules make that safe. A process that sends an
invalid message is killed. After that nothing it sends is used. And neither its rows nor
its place are given to a successor until its exit is known.

`fault_log` and `pool_metrics` report faults and counters, `inspector` serves requests
of observers, and `replay` replays crashes. This module imports nothing, so that a
process starts faster.
"""
