"""What XLA has compiled, kept from run to run in the user's cache folder.

TensorFlow writes an entry under another name and renames it, so processes may share the
folder. What else would end a training is looked for before TensorFlow sees the folder:
one that cannot be written to, a full disk, an entry that a crash of the host has cut.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

_FLAG = "--tf_xla_persistent_cache_directory"
_MAX_BYTES = 256 << 20  # of all versions together; an update takes 2 MB
_UNFINISHED_SECONDS = 3600.0  # then what was to be renamed is of a killed process


def keep_compiled_code(tensorflow_version: str) -> None:
    """Tell TensorFlow where to keep compiled code, unless `TF_XLA_FLAGS` says where.

    Does nothing where there is no folder to keep it in.
    """
    flags = os.environ.get("TF_XLA_FLAGS", "").strip()
    if _FLAG in flags or not (flags + "--").startswith("--"):  # a file of flags
        return
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
        cache = Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser()
        root = cache / "envserve" / "xla"
        folder = root / f"{tensorflow_version}-{_machine()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        _tidy(root, now=folder.stat().st_mtime)
        has_room = shutil.disk_usage(folder).free > _MAX_BYTES
        if has_room and len(str(folder).split()) == 1:  # flags end at spaces
            os.environ["TF_XLA_FLAGS"] = f"{flags} {_FLAG}={folder}".strip()


def _machine() -> str:
    """Return a hash of what compiled code depends on, besides TensorFlow's version."""
    facts = [platform.machine(), platform.processor(), str(os.cpu_count())]
    facts.append(os.environ.get("XLA_FLAGS", ""))
    for gpu in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        facts.append(gpu.read_text().partition("\n")[0])  # its model
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        names = ("model name", "flags", "Features")
        facts += [line for line in lines if line.startswith(names)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _tidy(root: Path, now: float) -> None:
    """Remove what is not whole, and the oldest of what is too much.

    `now` is by the clock of the file system.
    """
    found = []
    for path in root.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # another process tidies, too
            stat = path.stat()
            is_young = now - stat.st_mtime < _UNFINISHED_SECONDS
            if _is_whole(path) if path.suffix == ".pb" else is_young:
                found.append((stat.st_mtime, stat.st_size, path))
            else:
                path.unlink()
    total = 0
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > _MAX_BYTES:
            path.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    """Whether a file ends where the last of its protobuf fields does: the code."""
    with path.open("rb") as file:
        tag, end = b"", path.stat().st_size
        while file.tell() < end:
            tag, length, shift = file.read(1), 0, 0
            while (byte := (file.read(1) or b"\0")[0]) & 128:
                length, shift = length | (byte & 127) << shift, shift + 7
            file.seek(length | byte << shift, os.SEEK_CUR)
        return file.tell() == end and tag == b"\x1a"
