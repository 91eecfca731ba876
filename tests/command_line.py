"""Run a program's command line in this process."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from unittest import mock

import pytest

from envserve.cli.program import Program


class Result(NamedTuple):
    """The exit code of a command line and its output."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Text printed to stdout, then text printed to stderr."""
        return self.stdout + self.stderr


def invoke(
    program: Program,
    words: Sequence[str],
    *,
    input: str = "",
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run a command line with stdin, stdout and stderr that are not terminals.

    Restore the handler of SIGTERM, which some commands replace.
    """
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    with (
        mock.patch("sys.stdin", io.StringIO(input)),
        mock.patch.dict(os.environ, env or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ending,
    ):
        program.main(words)
    signal.signal(signal.SIGTERM, handler)
    return Result(int(ending.value.code or 0), out.getvalue(), err.getvalue())
