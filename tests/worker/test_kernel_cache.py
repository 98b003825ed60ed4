"""Compiled kernels stay on the host's own disk; what a cache on a network lacks is copied, by many at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.worker import kernel_cache
from parallel3d.worker.kernel_cache import KernelCache, filesystem_of, merge_missing, open_kernel_cache

PROCESSES = 4
NUM_FILES = 60
MERGE = """
import sys
from pathlib import Path
from parallel3d.worker.kernel_cache import merge_missing
print("ready", flush=True)
sys.stdin.readline()
print(merge_missing(Path(sys.argv[1]), Path(sys.argv[2])))
"""
COMPILE = """
import sys
from pathlib import Path
import torch
from parallel3d.worker.kernel_cache import KernelCache
from parallel3d.parallel.abort import AbortToken
from parallel3d.worker.device import init_device
cache = KernelCache(folder=Path(sys.argv[1]), shared=Path(sys.argv[2]))
cache.fetch(AbortToken())
init_device(torch.device("cpu"), kernels=cache.folder)
from torch._dynamo.utils import counters
x = torch.arange(32.0)
assert torch.equal(torch.compile(lambda x: torch.relu(x - 5) * 3)(x), torch.relu(x - 5) * 3)
cache.keep()
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


def mounts(folder: Path, *lines: str) -> Path:
    file = folder / "mountinfo"
    file.write_text("".join(f"{number} 1 0:{number} / {line}\n" for number, line in enumerate(lines)))
    return file


def test_the_file_system_of_a_folder(tmp_path):
    file = mounts(
        tmp_path,
        "/ rw,relatime shared:1 - ext4 /dev/sda1 rw",
        "/home rw - nfs4 server:/home rw",
        "/home/local rw - xfs /dev/sdb rw",
        r"/with\040späce rw master:2 - lustre at:/x rw",
        "/twice rw - ext4 /dev/sdc rw",
        "/twice rw - beegfs beegfs rw",
    )
    asked = ("/home/user/x", "/homes", "/home/local", "/with späce/a", "/twice/y", "/")
    assert [filesystem_of(Path(each), file) for each in asked] == ["nfs4", "ext4", "xfs", "lustre", "beegfs", "ext4"]
    assert filesystem_of(Path("/home"), tmp_path / "no such file") is None


def test_a_link_to_a_folder_on_a_network_is_on_the_network(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    file = mounts(tmp_path, "/ rw - ext4 /dev/sda1 rw", f"{tmp_path / 'far'} rw - nfs server:/ rw")
    assert filesystem_of(tmp_path / "near" / "cache", file) == "nfs"


def test_a_cache_on_a_disk_is_the_folder_and_one_on_a_network_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    root = "/ rw - ext4 /dev/sda1 rw"
    near = open_kernel_cache(tmp_path / "cache", mounts(tmp_path, root))
    assert near == KernelCache(folder=tmp_path / "cache/kernels", shared=None)
    found = open_kernel_cache(tmp_path / "cache", mounts(tmp_path, root, f"{tmp_path / 'cache'} rw - nfs a:/ rw"))
    assert found.shared == tmp_path / "cache/kernels" and found.folder.is_relative_to(tmp_path / "tmp")
    assert found.folder.parent.stat().st_mode & 0o777 == 0o700
    found.folder.parent.chmod(0o777)  # somebody else could put a library there
    again = open_kernel_cache(tmp_path / "cache", tmp_path / "mountinfo")
    assert again.folder.parent != found.folder.parent and again.folder.parent.stat().st_mode & 0o777 == 0o700


def test_many_processes_copy_what_is_missing(tmp_path):
    """Each from a folder of its own into one, some of the same names; a file is there whole, and none is replaced."""
    for process in range(PROCESSES):
        for number in range(process, NUM_FILES):
            path = tmp_path / f"host-{process}" / f"{number % 7}" / f"kernel-{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes([number]) * 50_000)
    kept = tmp_path / "shared" / "0" / "kernel-0"
    kept.parent.mkdir(parents=True)
    kept.write_text("first")
    command = [sys.executable, "-c", MERGE]
    folders = [[str(tmp_path / f"host-{process}"), str(tmp_path / "shared")] for process in range(PROCESSES)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([*command, *each], **pipes) for each in folders]
    assert [each.stdout.readline() for each in running] == ["ready\n"] * PROCESSES
    for each in running:
        each.stdin.write("\n")
        each.stdin.flush()
    copied = [int(each.communicate()[0]) for each in running]
    assert sum(copied) == NUM_FILES - 1 and kept.read_text() == "first"
    files = sorted(path for path in (tmp_path / "shared").rglob("*") if path.is_file() and path != kept)
    assert len(files) == NUM_FILES - 1, "scratch files are gone"
    assert all(path.read_bytes() == bytes([int(path.name.split("-")[1])]) * 50_000 for path in files)
    assert merge_missing(tmp_path / "host-0", tmp_path / "shared") == 0


def test_a_scratch_file_of_a_dead_copy_is_not_taken(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / ".copying-abc").write_text("half")
    assert merge_missing(tmp_path / "from", tmp_path / "to") == 0 and not (tmp_path / "to").exists()
    assert merge_missing(tmp_path / "nowhere", tmp_path / "to") == 0


def test_a_disk_that_takes_nothing_ends_no_run(tmp_path, capsys):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "kernel").write_text("x")
    (tmp_path / "file").write_text("no folder")
    KernelCache(folder=tmp_path / "here", shared=tmp_path / "file").keep()
    assert "compiled kernels were not copied to" in capsys.readouterr().out


def test_the_first_worker_adds_what_was_compiled_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, "KEEP_AFTER_S", 0.0)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "kernel").write_text("x")
    timer = KernelCache(folder=tmp_path / "here", shared=tmp_path / "shared").keep_later()
    assert timer is not None and timer.daemon
    timer.join()
    assert KernelCache(folder=tmp_path / "here", shared=None).keep_later() is None
    assert (tmp_path / "shared" / "kernel").read_text() == "x"


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.slow
def test_another_host_finds_what_torch_compile_has_made(tmp_path):
    """Real kernels: the second process has an empty folder of the same name, as another host has."""

    def start() -> str:
        command = [sys.executable, "-c", COMPILE, str(tmp_path / "own" / "kernels"), str(tmp_path / "shared")]
        own = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_DIR")}  # torch sets them
        done = subprocess.run(command, capture_output=True, text=True, env=own)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "own").mkdir()
    assert start() == "0 1\n"
    (tmp_path / "own").rename(tmp_path / "first host")
    (tmp_path / "own").mkdir()
    assert start() == "1 0\n"
