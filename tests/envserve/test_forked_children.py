"""A forked child cannot use the envs of its parent, and leaves them unchanged."""

from __future__ import annotations

import subprocess
import sys

from tests.oracle.probe_envs import MODULE

SCRIPT = '''
import contextlib, gc, os, signal, sys, time
import numpy as np
import envserve
from envserve.client import BatchEnv
from envserve.errors import LocalProtocolError

MODULE, ADDRESS = sys.argv[1:]
NAME = "envserve/Faulty-v0"
local = {"import_modules": [MODULE]}
where = {"addresses": [ADDRESS]} if ADDRESS else local


def make_batch():
    if ADDRESS:
        return BatchEnv.connect(NAME, [ADDRESS], 2, infos="all")
    return BatchEnv.local(NAME, 2, 2, infos="all", **local)


def fork(made, end):
    """Run `end` in a child, and return its exit code."""
    if (pid := os.fork()) == 0:
        end(made)
        gc.collect()
        os._exit(0)
    give_up_at = time.monotonic() + 40.0
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > give_up_at:
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])



def use(made):
    """Check that all operations of envs raise errors."""
    envs = made[0]
    operations = [envs.reset, lambda: envs.step(actions), envs.render]
    if isinstance(envs, BatchEnv):
        operations += [envs.recv, lambda: envs.send(actions)]
    for operation in operations:
        try:
            operation()
        except LocalProtocolError as error:
            assert "forked child" in str(error), error
        else:
            sys.exit(f"{operation} has used the envs of the parent")
    os._exit(0)


makers = {
    "make": lambda: envserve.make(NAME, **({"address": ADDRESS} if ADDRESS else local)),
    "make_vec": lambda: envserve.make_vec(NAME, 2, **where),
    "batch": make_batch,
}
ends = {
    "use": use,
    "close": lambda made: made[0].close(),
    "drop": lambda made: made.clear(),
    "exit": lambda made: sys.exit(0),
}
for name, make in makers.items():
    made = [make()]
    made[0].reset()
    actions = 0 if name == "make" else np.zeros(2, np.int64)
    for how, end in ends.items():
        assert fork(made, end) == 0, (name, how)
        for _ in range(3):
            result = made[0].step(actions)
            info = result[4] if isinstance(result, tuple) else result.infos
            assert "fault" not in str(info), (name, how, info)
    made[0].close()
print("done")
'''


def test_the_envs_of_the_parent_are_not_affected(shared_address: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, MODULE, shared_address],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
