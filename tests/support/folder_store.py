"""A remote store that is a folder, for runs in other processes: `folder:///path`. Files beside it make it misbehave.

`site(tmp_path)` is the environment in which fsspec finds it, as an installed driver: by an entry point.
    /path.hang      each write waits, for ever
    /path.fail      each write fails, and the error quotes credentials
    /path.slow      each write takes as many seconds as the file says
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

ROOT = Path(__file__).parents[2]
SECRET = "AKIA5SECRET0KEY99XYZ"
METADATA = "Metadata-Version: 2.1\nName: folder-store\nVersion: 1.0\n"
ENTRY_POINT = "[fsspec.specs]\nfolder = tests.support.folder_store:FolderStore\n"


class FolderStore(LocalFileSystem):
    protocol = "folder"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("folder://"))

    def open(self, path, mode="rb", **options):
        if "w" in mode:
            misbehave(self._strip_protocol(path))
        return super().open(path, mode, **options)

    def pipe_file(self, path, value, mode="overwrite", **options):
        with self.open(path, "wb") as file:
            file.write(value)


def misbehave(path: str) -> None:
    for folder in (Path(path), *Path(path).parents):
        while Path(f"{folder}.hang").exists():
            time.sleep(0.05)
        if Path(f"{folder}.fail").exists():
            raise ConnectionError(f"https://user:{SECRET}@host says no to {SECRET}")
        if (slow := Path(f"{folder}.slow")).exists():
            time.sleep(float(slow.read_text()))


def site(folder: Path) -> dict[str, str]:
    """The environment of processes that have this driver; also sets it for those that inherit this one's."""
    info = folder / "site" / "folder_store-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    return {"PYTHONPATH": os.pathsep.join([str(info.parent), str(ROOT)])}
