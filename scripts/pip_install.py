"""Install packages with pip, and print its progress every few seconds.

    python scripts/pip_install.py --constraint constraints.txt --editable '.[train]'

On its own, pip prints either nothing or hundreds of lines. Requires only pip.
"""

import subprocess
import sys
import threading
import time

SECONDS_BETWEEN_LINES = 5.0
#: -P: no file of the working directory is imported. envserve may not be installed yet.
PYTHON = (sys.executable, "-P")  # noqa: TID251
COMMAND = (*PYTHON, "-m", "pip", "--disable-pip-version-check", "install")


def main() -> int:
    said = [""]
    began = time.monotonic()
    with subprocess.Popen(
        [*COMMAND, "--progress-bar", "off", *sys.argv[1:]],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=said.extend, args=(process.stdout,))
        reader.start()
        while process.poll() is None:
            reader.join(SECONDS_BETWEEN_LINES)
            if reader.is_alive():
                seconds = time.monotonic() - began
                print(f"  {seconds:3.0f} s  {said[-1].strip():.70}", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
