"""Where kernels that torch.compile and Triton have compiled are kept: on the host's own disk.

A data.cache_directory on a network would be read by all workers of all hosts at once when a run starts, in many small
files; HLAT ("Neuron Persistent Cache on Local Worker") names timeouts that come of it. So hosts compile into a folder
of their own then, start with what the cache has, and add what it lacks:

<cache_directory>/kernels/   of all hosts
<temporary folder>/parallel3d-<user>/kernels/   of this one; the same path on each host, as kernels name theirs

Files never change once they have their name, so a copy is always of what is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Timer

from parallel3d.data.cache import locked
from parallel3d.parallel.abort import AbortToken

MOUNTS = Path("/proc/self/mountinfo")
NETWORK_FILESYSTEMS = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "orangefs")
    + ("panfs", "pvfs2", "smb3", "smbfs", "wekafs")
)
KEEP_AFTER_S = 120.0
"""When a run's first worker adds to the cache: kernels are compiled in a run's first steps."""
_COPYING = ".copying-"
_OCTAL = re.compile(r"\\([0-7]{3})")
"""How the table of mounts writes a space, a tab, a newline and a backslash: \\040."""


@dataclass(frozen=True, kw_only=True)
class KernelCache:
    """folder: where this host's kernels are. shared: the folder of all hosts, None where `folder` is that itself."""

    folder: Path
    shared: Path | None

    def fetch(self, token: AbortToken) -> None:
        """Copies what other hosts have compiled: the first process of a host does, the others wait for it.

        Raises GenerationEnded once the token is aborted.
        """
        if self.shared is not None:
            with locked(self.folder.parent / "kernels.lock", token, partial(print, flush=True)):
                _merge_what_can_be(self.shared, self.folder)

    def keep(self) -> None:
        """Adds to the shared folder what it lacks of this host's."""
        if self.shared is not None:
            _merge_what_can_be(self.folder, self.shared)

    def keep_later(self) -> Timer | None:
        """`keep` in a while, in a thread that ends with the process; None if there is nothing to keep."""
        if self.shared is None:
            return None
        timer = Timer(KEEP_AFTER_S, self.keep)
        timer.daemon = True
        timer.start()
        return timer


def open_kernel_cache(cache_directory: str | Path, mounts: Path = MOUNTS) -> KernelCache:
    """The cache's own folder, or one on this host's disk if the cache lies on a network."""
    shared = Path(cache_directory).expanduser() / "kernels"
    if filesystem_of(shared, mounts) not in NETWORK_FILESYSTEMS:
        return KernelCache(folder=shared, shared=None)
    return KernelCache(folder=_own_folder(Path(tempfile.gettempdir())) / "kernels", shared=shared)


def filesystem_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The type of the file system at a path, or of the one on which it would be made; None where Linux doesn't say.

    Of mounts on the same folder the last hides the others (proc(5), mountinfo).
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    found, longest, real = None, -1, path.resolve()
    for line in lines:
        fields, _, kind = line.partition(" - ")
        folder = Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), fields.split()[4]))
        if real.is_relative_to(folder) and len(folder.parts) >= longest:
            found, longest = kind.split()[0], len(folder.parts)
    return found


def merge_missing(source: Path, target: Path) -> int:
    """Copies the files that `target` lacks below it; returns how many. Other processes may do the same, either way.

    A file gets its name when it is whole, and none is replaced. Raises OSError where a folder can't be written.
    """
    num_copied = 0
    for folder, _, names in os.walk(source):
        into = target / Path(folder).relative_to(source)
        there = set(os.listdir(into)) if into.is_dir() else set()
        for name in sorted(set(names) - there):
            if not name.startswith(_COPYING):
                num_copied += _copy(Path(folder) / name, into / name)
    return num_copied


def _copy(source: Path, target: Path) -> bool:
    """Whether it is this process that has put the file there."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(prefix=_COPYING, dir=target.parent)
    os.close(descriptor)
    try:
        shutil.copy2(source, name)
        _name(Path(name), target)
    except (FileExistsError, FileNotFoundError):
        return False  # another process was first, or the compiler has removed a scratch file
    finally:
        Path(name).unlink(missing_ok=True)
    return True


def _name(made: Path, target: Path) -> None:
    """Gives a whole file its name; raises FileExistsError if there is one."""
    try:
        os.link(made, target)
    except FileExistsError:
        raise
    except OSError:  # no links on this file system
        made.rename(target)


def _merge_what_can_be(source: Path, target: Path) -> None:
    """A disk that is full or not ours costs compiling again, and no run."""
    try:
        merge_missing(source, target)
    except OSError as error:
        print(f"compiled kernels were not copied to {target}: {error}", flush=True)


def _own_folder(temporary: Path) -> Path:
    """A folder that no other user can write to: libraries are loaded from it."""
    folder = temporary / f"parallel3d-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="parallel3d-", dir=temporary))
