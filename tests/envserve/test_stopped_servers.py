"""A server that is stopped and later continued costs only time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from envserve.client import BatchEnv
from tests.envserve.server_process import LEDGER, LEDGER_OPTIONS, ServerProcess
from tests.oracle.batch_driver import BatchDriver
from tests.oracle.ledger import Ledger

SEED = 3
NUM_SHORT_STOPS = 40
SHORT_SECONDS = 0.005
#: Seconds, long enough for clients to resend a request.
LONG_SECONDS = 2.0
#: `envserve` with a signal handler that blocks its event loop for a while; libzmq's
#: threads and the workers continue.
HANGING_PROGRAM = (
    "-c",
    "import signal, time\n"
    f"signal.signal(signal.SIGUSR1, lambda *_: time.sleep({SHORT_SECONDS}))\n"
    f"signal.signal(signal.SIGUSR2, lambda *_: time.sleep({LONG_SECONDS}))\n"
    "from envserve.cli.app import main\n"
    "main()",
)


def stop_process(server: ServerProcess, seconds: float) -> None:
    server.signal(signal.SIGSTOP)
    threading.Event().wait(seconds)
    server.signal(signal.SIGCONT)


def hang_event_loop(server: ServerProcess, seconds: float) -> None:
    is_short = seconds == SHORT_SECONDS
    server.signal(signal.SIGUSR1 if is_short else signal.SIGUSR2)
    threading.Event().wait(seconds)


@pytest.mark.parametrize("stop", [stop_process, hang_event_loop])
def test_a_server_that_stops_for_a_while_costs_only_time(
    stop: Callable[[ServerProcess, float], None],
    tmp_path: Path,
    random_generator: np.random.Generator,
) -> None:
    gaps = random_generator.uniform(0.0, 0.005, NUM_SHORT_STOPS)
    journal = tmp_path / "journal"

    def stop_again_and_again(server: ServerProcess) -> None:
        for gap in gaps:
            threading.Event().wait(gap)
            stop(server, SHORT_SECONDS)
        stop(server, LONG_SECONDS)

    with (
        ServerProcess(tmp_path, *LEDGER_OPTIONS, program=HANGING_PROGRAM) as server,
        BatchEnv.connect(
            LEDGER,
            [server.address],
            8,
            seed=SEED,
            num_splits=2,
            env_kwargs={"journal": str(journal)},
        ) as batch,
    ):
        player = BatchDriver(batch, Ledger(8, SEED), random_generator)
        stopper = threading.Thread(target=stop_again_and_again, args=(server,))
        stopper.start()
        while stopper.is_alive():
            player.step()
            player.send_and_receive(5)
        player.step()
    player.ledger.finish(journal)
    assert player.ledger.num_valid == player.ledger.num_rows
    assert player.ledger.num_unseen == 0
    assert player.ledger.longest_seconds > LONG_SECONDS / 2
