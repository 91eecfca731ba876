"""`envserve replay`: reproduce a crash from its repro file, and debug or film it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envserve.cli.options import Count, Import, Seconds, import_from_here
from envserve.cli.terminal import fail
from envserve.errors import EnvserveError, EnvStartError
from envserve.text import printable

if TYPE_CHECKING:
    import numpy as np

    from envserve.crashes.repro_file import Repro
    from envserve.monitoring.video import VideoWriter


def replay(
    file: Path,
    *,
    import_: Import = (),
    timeout: Seconds | None = None,
    pdb: bool = False,
    film: Path | None = None,
    last: Count = 200,
) -> int:
    """Replay a crash from its repro file, and check that the env ends as recorded.

    Exit codes: 0 if the env ends as recorded, 1 if not, 2 if the file or the env cannot
    be loaded, or the video cannot be written.

    Args:
      file: Repro file of a crash; the log message about the crash names it.
      timeout: Seconds after which a step counts as hung; by default, the step timeout
        at the time of the crash.
      pdb: Run the env in this process, and open pdb where it crashes.
      film: MP4 or GIF file to write a video of the last steps to.
      last: Number of steps to film before the crash.
    """
    from envserve.envs.registry import import_env_modules
    from envserve.monitoring.video import VideoWriter
    from envserve.pool import replay as replays
    from envserve.pool.launcher import Launcher
    from envserve.worker.rendering import headless_variables

    if pdb and film:
        fail("expected --pdb or --film; got both", 2)
    import_from_here(import_)
    repro = replays.load_repro(file)
    # `Program.main` handles errors of stdout.
    print(replays.describe_repro(repro), flush=True)
    try:
        if pdb:
            import_env_modules(import_)
            if not _debug(repro):
                fail("the env did not crash; there is nothing to debug", 1)
            return 0
        with contextlib.ExitStack() as stack:
            writer = on_frame = None
            if film:
                writer = stack.enter_context(VideoWriter(film))
                on_frame = partial(_add_frame, writer)
                # The worker that replays the crash inherits these variables.
                os.environ.update(headless_variables(os.environ))
            launcher = stack.enter_context(contextlib.closing(Launcher(import_)))
            result = replays.replay(repro, launcher, timeout, on_frame, last)
            has_imported = launcher.has_imported
    except (EnvserveError, OSError) as error:
        fail(error, 2)
    if writer is not None:
        print(f"{film}: {writer.num_frames} frames")
    verdict = "reproduced" if result.is_reproduced else "not reproduced:"
    print(verdict, printable(result.text))
    if result.is_reproduced:
        return 0
    return 1 if has_imported else 2


def _add_frame(
    writer: VideoWriter, frames_per_second: float, frame: np.ndarray[Any, Any]
) -> None:
    writer.frames_per_second = frames_per_second
    writer.add(frame)


def _debug(repro: Repro) -> bool:
    """Replay a crash in this process; return whether the debugger was opened.

    If the env raised an exception, the debugger opens where it was raised. If the
    process exited or hung, or the step returned an invalid value, the debugger opens
    before the last step.
    """
    import bdb
    import traceback
    from pdb import Pdb

    from envserve.slab import Status
    from envserve.worker.replay_worker import apply_actions, build_env

    try:
        env = build_env(repro)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise EnvStartError(f"the env cannot be built: {reason}") from error
    last = len(repro.played.actions[0])
    is_raised = repro.end.status is Status.ENV_ERROR and not repro.end.is_violation
    has_stopped = False  # whether the debugger was opened before the last step
    # A stranger may have put a file .pdbrc into the working directory, too.
    debugger = Pdb(readrc=False)
    with contextlib.suppress(OSError, RuntimeError, UnicodeError):
        commands = Path("~/.pdbrc").expanduser().read_text("utf-8")
        debugger.rcLines = commands.splitlines(keepends=True)

    def step(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (result := debugger.runcall(method, *args, **kwargs)) is None:
            raise bdb.BdbQuit
        return result

    def on_action(number: int) -> None:
        nonlocal has_stopped
        if number == last and not is_raised:
            has_stopped = True
            print("The last step follows: n runs a line, s enters a call.")
            env.intercept_calls(step)

    try:
        apply_actions(repro, env, on_action)
    except bdb.BdbQuit:
        return True
    except Exception as error:
        print(printable("".join(traceback.format_exception(error))), file=sys.stderr)
        if not has_stopped:
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
        return True
    finally:
        env.close()
    return has_stopped
