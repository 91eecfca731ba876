"""Fuzz every decoder with mutated bytes, as scripts/fuzz_decoders.py does."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

import pytest

from tests.envserve.fuzzing import fuzz, make_targets

NUM_BODIES = 100_000
MAX_GROWTH_BYTES = 32 << 20


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_decoders_decode_or_reject_any_bytes(pytestconfig: pytest.Config) -> None:
    seed = int(pytestconfig.getoption("random_seed"))
    targets = make_targets()
    fuzz(targets, 2_000, seed)
    gc.collect()
    logging.disable(logging.CRITICAL)
    gc.disable()  # its pauses would count as decoding time
    try:
        before = resident_bytes()
        fuzz(targets, NUM_BODIES, seed)
        growth = resident_bytes() - before
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
    assert growth < MAX_GROWTH_BYTES, (
        f"expected growth of less than {MAX_GROWTH_BYTES} bytes; got {growth}"
    )
    for name, target in targets.items():
        seconds, data = target.slowest
        assert seconds < target.max_seconds, (
            f"{name}: expected less than {target.max_seconds} s; got {seconds:.4f} for "
            f"{data.hex()}"
        )
    rejecting = [name for name, target in targets.items() if target.expected_errors]
    assert all(targets[name].num_rejected for name in rejecting)
