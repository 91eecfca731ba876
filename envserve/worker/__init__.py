"""Code that runs in worker processes, where the envs are built, stepped and reset.

Processes. The process that uses the envs (a trainer or a server) starts a template
process (`template`), which imports the user's env modules once. The template forks the
workers and kills them on request. A worker (`process`) hosts one or more blocks of rows
and executes one operation at a time in its main thread. With spare envs, other threads
reset envs that are not being stepped (`spare_row`). No module in this package imports
zmq or asyncio.

Messages. The pool and each worker exchange short messages over a socket pair
(`channel`): an operation on a block, and exactly one reply to it. Infos, faults and
call results are part of the reply (`worker_report`).

Shared memory. The arrays are in the slab (`envserve.slab`), which the pool and all its
workers map. At any time, the rows of a block belong either to the pool or to the
worker. While the block is idle, the pool may write its actions and read its results.
From the message that starts an operation until the DONE that replies to it, the worker
writes the block's observations, rewards, flags and statuses. No lock is needed, because
the messages order these accesses. All other data has a single writer, and readers that
tolerate any content:

- the worker's heartbeat changes with every env call, so that the pool detects hangs;
- `step_timings` counts durations;
- the action ring (`envserve.crashes`) contains the last actions of each row, from which
  a crash is replayed;
- the frame board contains rendered frames, and the requests of the pool to render them.

Death. A worker may be killed at any moment: by the kernel, by an env that crashes or
exits, or by the pool when a heartbeat stops. This is safe for three reasons. No lock is
shared between processes. The pool discards the result of an interrupted step: it
replaces the step with a lost transition (truncated, reward 0), whose final observation
consists of the finite values in the rows. The blocks of a worker are marked as lost,
and a new worker is started, only once the process is known to have ended; until then,
no other process writes these rows. The shared memory remains mapped in the pool, so
afterwards the heartbeat and the action ring show which env was running, and with which
action.
"""
