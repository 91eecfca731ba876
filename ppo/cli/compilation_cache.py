"""Cache XLA-compiled code across runs, in the user's cache folder.

TensorFlow writes entries atomically, so processes can share the folder. Before it uses
the folder, this module checks for problems that would abort a training run: a folder
that is not writable, a full disk or quota, and incomplete entries after a crash of the
host. A folder to which other users can write is not used, because they could add code.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from envserve.envs.user_envs import writable_by_others

_FLAG = "--tf_xla_persistent_cache_directory"
_MAX_BYTES = 256 << 20  # maximum cache size; the code of an update has about 2 MB
_PROBE_BYTES = 8 << 20  # size of a file that must fit into the folder
#: Age of a temporary file after which the process that wrote it must have been killed.
_UNFINISHED_SECONDS = 3600.0


def enable_compilation_cache(tensorflow_version: str) -> None:
    """Set `TF_XLA_FLAGS` so that TensorFlow caches compiled code.

    Do nothing if the user has set a cache folder, or if this module's folder cannot be
    used.
    """
    flags = os.environ.get("TF_XLA_FLAGS", "").strip()
    # TF_XLA_FLAGS may contain the name of a file with flags, which is left unchanged.
    if _FLAG in flags or not (flags + "--").startswith("--"):
        return
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
        cache = Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser()
        root = cache / "envserve" / "xla"
        folder = root / f"{tensorflow_version}-{_machine_hash()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if writable_by_others(str(folder)):  # others could add code, which is run
            return
        with tempfile.TemporaryFile(dir=folder) as file:  # fails if a quota is used up
            file.write(bytes(_PROBE_BYTES))
        _clean_up(root, now=folder.stat().st_mtime)
        has_space = shutil.disk_usage(folder).free > _MAX_BYTES
        if has_space and len(str(folder).split()) == 1:  # spaces separate flags
            os.environ["TF_XLA_FLAGS"] = f"{flags} {_FLAG}={folder}".strip()


def _machine_hash() -> str:
    """Return a hash of the hardware and the XLA flags that compiled code depends on."""
    facts = [platform.machine(), platform.processor(), str(os.cpu_count())]
    facts.append(os.environ.get("XLA_FLAGS", ""))
    for gpu in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        facts.append(gpu.read_text().partition("\n")[0])  # model name
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        names = ("model name", "flags", "Features")
        facts += [line for line in lines if line.startswith(names)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _clean_up(root: Path, now: float) -> None:
    """Remove incomplete entries, then the oldest ones until the cache fits its limit.

    `now` is the current time on the file system's clock.
    """
    found = []
    for path in root.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            stat = path.stat()
            is_recent = now - stat.st_mtime < _UNFINISHED_SECONDS
            if _is_complete(path) if path.suffix == ".pb" else is_recent:
                found.append((stat.st_mtime, stat.st_size, path))
            else:
                path.unlink()
    total = 0
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > _MAX_BYTES:
            path.unlink(missing_ok=True)


def _is_complete(path: Path) -> bool:
    """Return whether a cached protobuf file is not truncated.

    A complete file ends with its last field (number 3), the compiled code.
    """
    with path.open("rb") as file:
        tag, end = b"", path.stat().st_size
        while file.tell() < end:
            tag, length, shift = file.read(1), 0, 0
            while (byte := (file.read(1) or b"\0")[0]) & 128 and length <= end:
                length, shift = length | (byte & 127) << shift, shift + 7
            file.seek(min(length | byte << shift, end + 1), os.SEEK_CUR)
        return file.tell() == end and tag == b"\x1a"
