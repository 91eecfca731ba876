"""`ppo train --page`: the page of a finished run stays open for its viewers."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.envserve.page_client import Browser
from tests.ppo.test_cli_run import SMALL, finished, read_until, start

pytestmark = pytest.mark.timeout(600)


def test_the_page_of_a_finished_run_stays_open_until_ctrl_c(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = (*SMALL, "--set", "total_steps=256", "--run-dir", folder, "--page")
    with (
        start("train", "CartPole-v1", *options) as process,
        ThreadPoolExecutor() as pool,
    ):
        try:
            found = re.search(r"Page: (\S+)", "".join(read_until("Page: ", process)))
            assert found is not None
            with Browser(found[1]).events() as events:
                # A browser that does not read would be disconnected.
                is_last = lambda run: run["row"].get("steps") == 256  # noqa: E731
                watching = pool.submit(events.until, "run", is_last)
                read_until("The page stays open", process)
                assert (folder / "evaluation.json").exists()
                watching.result()
                state = events.until("server", lambda state: bool(state["status"]))
                (lease,) = state["status"]["leases"]
                assert (lease["num_envs"], lease["absent"]) == (4, [])
                process.send_signal(signal.SIGINT)
                assert finished(process) == ""
        finally:
            process.kill()
