"""Install packages with pip, and print its progress every few seconds.

    python scripts/pip_install.py --constraint constraints.txt --editable '.[train]'

By itself, pip prints either nothing or hundreds of lines, and no line while it unpacks
large packages. Requires only pip.
"""

import compileall
import re
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

SECONDS_BETWEEN_LINES = 5.0
#: -P prevents imports from the working directory. `envserve.python_process` cannot be
#: used here, because envserve may not be installed yet.
PYTHON = (sys.executable, "-P")  # noqa: TID251
COMMAND = (*PYTHON, "-m", "pip", "--disable-pip-version-check", "install")
OPTIONS = ("--no-compile", "--progress-bar", "off")


def normalised(name: str) -> str:
    """Return the normalised form of a package name, for comparisons."""
    return re.sub(r"[-_.]+", "-", name).lower()


def progress(lines: list[str]) -> str:
    """Return pip's last line, or the package that it is installing.

    pip lists the packages in the order in which it installs them, and then prints
    nothing until it has installed all of them.
    """
    title = "Installing collected packages: "
    for line in lines:
        if line.startswith(title):
            names = line.removeprefix(title).strip().split(", ")
            folders = Path(sysconfig.get_path("purelib")).glob("*.dist-info")
            done = {normalised(folder.name.partition("-")[0]) for folder in folders}
            missing = [name for name in names if normalised(name) not in done]
            count = f"{len(names) - len(missing)} of {len(names)} packages installed"
            return f"{count}, next {missing[0]}" if missing else count
    return f"{lines[-1].strip():.70}"


def main() -> int:
    lines = [""]
    started = time.monotonic()
    with subprocess.Popen(
        [*COMMAND, *OPTIONS, *sys.argv[1:]],
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=lines.extend, args=(process.stdout,))
        reader.start()
        while process.poll() is None:
            reader.join(SECONDS_BETWEEN_LINES)
            if reader.is_alive():
                seconds = time.monotonic() - started
                print(f"  {seconds:3.0f} s  {progress(lines)}", flush=True)
    if process.returncode == 0:
        # pip would compile on one core; this call uses all cores. Like pip, it ignores
        # files that cannot be compiled: some packages contain code for other versions
        # of Python.
        seconds = time.monotonic() - started
        print(f"  {seconds:3.0f} s  compiling the packages ...", flush=True)
        libraries = sysconfig.get_path("purelib")
        compileall.compile_dir(libraries, quiet=2, workers=0)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
