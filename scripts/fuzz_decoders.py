"""Pass malformed message bodies to every decoder.

    python scripts/fuzz_decoders.py                       1 million message bodies
    python scripts/fuzz_decoders.py --bodies 10000000     10 million bodies
    python scripts/fuzz_decoders.py --seed 7              1 million other bodies
    python scripts/fuzz_decoders.py --guided 300          each decoder for 5 minutes

`--guided` requires Atheris, which uses code coverage to choose bytes instead of random
numbers. The script fails at the first body that is neither decoded nor rejected.
"""

import contextlib
import logging
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def fuzz_guided(atheris: Any, name: str, target: Any, seconds: int) -> None:
    """Let Atheris search for bytes that break a decoder, in a separate process."""
    pid = os.fork()
    if not pid:
        with tempfile.TemporaryDirectory() as corpus:
            for number, data in enumerate(target.valid):
                Path(corpus, str(number)).write_bytes(data)
            options = (f"-max_total_time={seconds}", "-max_len=65536", "-verbosity=0")
            atheris.Setup([name, *options, corpus], target.run)
            atheris.Fuzz()
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"{name}: Atheris has found a failure")
    print(f"{name:20} no failure in {seconds} s", flush=True)


def main(
    bodies: Annotated[
        int, typer.Option(help="Number of bodies, over all decoders.")
    ] = 10**6,
    seed: Annotated[int, typer.Option(help="Seed of the changes to valid bodies.")] = 0,
    guided: Annotated[int, typer.Option(help="Seconds of Atheris per decoder.")] = 0,
) -> None:
    logging.disable(logging.CRITICAL)
    instrumented: Any = contextlib.nullcontext()
    if guided:
        import atheris

        instrumented = atheris.instrument_imports(include=["envserve"])
    with instrumented:
        from tests.envserve.fuzzing import fuzz, make_targets

    targets = make_targets()
    if guided:
        for name, target in targets.items():
            fuzz_guided(atheris, name, target, guided)
        return
    fuzz(targets, 10_000, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fuzz(targets, bodies, seed + 1)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for name, target in targets.items():
        seconds, data = target.slowest
        print(
            f"{name:20} {target.num_rejected:9,} rejected; slowest "
            f"{1e3 * seconds:6.3f} ms, {len(data)} bytes"
        )
    print(f"{bodies:,} bodies; memory grew by at most {grown / 1024:.1f} MiB")


if __name__ == "__main__":
    typer.run(main)
