"""Workers on systems without `os.waitid`: macOS before Python 3.13."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = "import os\ndel os.waitid\n"
SCRIPT = """
import os, signal, time
import numpy as np
from envserve.client import BatchEnv

assert not hasattr(os, "waitid")
with BatchEnv.local("CartPole-v1", 4, num_workers=2, seed=0) as batch:
    batch.reset()
    (pool,) = batch.lanes
    actions = np.zeros(4, np.int64)
    batch.step(actions)
    killed, kept = pool.worker_pids
    os.kill(killed, signal.SIGKILL)
    give_up_at = time.monotonic() + 30.0
    results = [batch.step(actions)]
    while not results[-1].valid.all() and time.monotonic() < give_up_at:
        results.append(batch.step(actions))
    assert results[-1].valid.all()
    lost = [info["fault"]["text"] for r in results for info in r.infos.values()
            if "fault" in info]
    assert all("was killed by SIGKILL" in text for text in lost), lost
    assert len(lost) == 2
    assert pool.worker_pids[0] != killed and pool.worker_pids[1] == kept
"""


def test_a_killed_worker_is_reaped_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-c", SCRIPT]
    subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=120.0
    )
