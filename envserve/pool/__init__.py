"""Start, watch, use and replace the workers of one host, from the parent process.

A `Pool` (`pool`) belongs to the process that uses the envs: a trainer or a server. See
`envserve.worker` for the worker processes and the shared memory. From bottom to top:

- `launcher` asks a template process to fork and kill worker processes, and reports
  their exits.
- `supervisor` keeps one worker running across process restarts: it starts the process,
  kills it if it hangs or misbehaves, and restarts it with increasing delays.
  `worker_states` defines the states and events.
- `worker_set` holds all workers of a pool and the slab.
- `block_operations` tracks which operation runs on which block, and which blocks are
  lost. It converts worker events to outcomes.
- `pool` connects these parts to a selector, implements `lane.Lane` and serves observer
  requests.

There are no threads. Commands are passed down as calls, events are passed up as return
values, and time is an argument. Except when workers are closed or replaced, nothing
blocks on a worker, because one loop may serve many pools: writes are queued, and
deadlines detect a worker that does not reply.

A worker's process may die at any moment, and its messages may be invalid, because env
code may write them. Three rules make this safe:

- A process that sends an invalid message is killed.
- The messages of a killed process are ignored.
- The rows and the index of a process are not reused until it is known to have ended.

`fault_log` and `pool_metrics` report faults and counters, and `replay` replays crashes.
This module imports nothing, so that processes start faster.
"""
