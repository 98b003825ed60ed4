"""`parallel3d doctor` finds faults that are really there: in a child's limits, variables, folders, packages, ports."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from parallel3d.doctor import host_checks
from parallel3d.doctor.environment_checks import REQUIRED, check_gpus_and_torch, count_driver_gpus
from parallel3d.doctor.finding import Finding
from parallel3d.usable_cores import read_cgroup_quota, usable_cores

ROOT = Path(__file__).parents[2]
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}


def doctor(
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    python: tuple[str, ...] = (),
    before: Callable[[], None] | None = None,
) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of `parallel3d doctor --json`."""
    done = subprocess.run(
        [sys.executable, *python, "-m", "parallel3d", "doctor", "--json", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(variables or {})},
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=before,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def free_port() -> int:
    """A port below those that the kernel gives to others in the meantime."""
    for port in range(15_000, 16_000):
        try:
            socket.create_server(("", port)).close()
            return port
        except OSError:
            continue
    pytest.fail("no free port")


def worse(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Findings that are not OK, by topic."""
    return {each["topic"]: each for each in report["findings"] if each["level"] != "ok"}


def test_every_fault_of_one_machine_is_found(tmp_path: Path):
    """Five at once: a port that is taken, too few files, a variable, an interface, a home that is not a folder."""

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    with socket.create_server(("", 0)) as listener:
        variables = {
            **LAUNCHED,
            "MASTER_PORT": str(listener.getsockname()[1]),
            "OMP_NUM_THREADS": "four",
            "NCCL_SOCKET_IFNAME": "ib99",
            "HOME": os.devnull,
        }
        code, report = doctor("--config", "quickstart", variables=variables, before=limit_files)
    found = worse(report)
    assert code == 1 and report["problem"] >= 4
    assert found["MASTER_PORT"]["level"] == "problem" and "another" in found["MASTER_PORT"]["fix"]
    assert found["open files"]["level"] == "problem" and "ulimit -Hn" in found["open files"]["fix"]
    assert found["OMP_NUM_THREADS"]["level"] == "problem" and "'four'" in found["OMP_NUM_THREADS"]["text"]
    assert found["NCCL_SOCKET_IFNAME"]["level"] == "problem" and "lo" in found["NCCL_SOCKET_IFNAME"]["fix"]
    assert found["C cache"]["level"] == "warning"
    assert all(each["fix"] for each in found.values())


@pytest.mark.full
def test_a_machine_without_these_faults_has_none_of_these_findings():
    code, report = doctor("--config", "quickstart", variables={**LAUNCHED, "MASTER_PORT": str(free_port())})
    found = worse(report)
    assert not found.keys() & {"MASTER_PORT", "open files", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "C cache"}
    assert code == (1 if report["problem"] else 0)
    assert {"host", "packages", "launcher", "GPUs", "own name", "disk", "clock"} <= {
        each["topic"] for each in report["findings"]
    }


@pytest.mark.full
def test_missing_packages_are_named_without_any_of_them():
    code, report = doctor(python=("-S",))  # only the standard library is there
    assert code == 1
    named = {each["text"].split()[0] for each in report["findings"] if each["level"] == "problem"}
    assert named == set(REQUIRED)


def test_the_required_packages_are_those_of_the_project():
    listed = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    assert set(REQUIRED) == set(re.findall(r'"([a-z]+)', listed[1]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "variables", "topic"),
    [
        ((), {"RANK": "0"}, "launcher"),
        ((), {**LAUNCHED, "RANK": "7", "MASTER_PORT": "1"}, "launcher"),
        (("--config", "quickstart", "model.hidden_size=7"), {}, "configuration"),
        (("--config", "quickstart", "checkpoint.directory=/proc/nowhere"), {}, "run folder"),
        (("--config", "hlat_70b", "parallel.dp_size=32"), {}, "disk"),
    ],
)
def test_a_problem(arguments: tuple[str, ...], variables: dict[str, str], topic: str):
    code, report = doctor(*arguments, variables=variables)
    assert code == 1 and worse(report)[topic]["level"] == "problem" and worse(report)[topic]["fix"]


def levels(findings: Any) -> list[str]:
    return [finding.level for finding in findings]


def test_a_cgroup_that_allows_less_than_the_cores(tmp_path: Path):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    quota = read_cgroup_quota(tmp_path)
    assert (quota, usable_cores(tmp_path)) == (0.5, 1)
    (found,) = host_checks.check_threads({}, quota=quota, num_workers=2)
    assert found.level == "warning" and "run.threads_per_rank to 1" in found.fix
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert usable_cores(tmp_path) == 1
    assert levels(host_checks.check_threads({}, quota=1.5, num_workers=1)) == ["ok"]
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert (read_cgroup_quota(tmp_path), usable_cores(tmp_path)) == (None, os.cpu_count())


def test_cores_taken_away():
    """By taskset, as schedulers do: os.cpu_count() still counts them."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    try:
        os.sched_setaffinity(0, [min(before)])
        assert levels(host_checks.check_threads({}, quota=None, num_workers=1)) == ["warning"]
    finally:
        os.sched_setaffinity(0, before)


def test_an_unknown_name():
    name = "no-such-host.invalid"  # the resolver knows that .invalid has none (RFC 6761), or is not there
    (alone,), (several,) = (host_checks.check_name(name, one_host=one_host) for one_host in (True, False))
    assert (alone.level, several.level) == ("warning", "problem") and "/etc/hosts" in several.fix
    assert levels(host_checks.check_name("localhost", one_host=True)) == ["ok"]
    (found,) = host_checks.check_name("localhost", one_host=False)
    assert found.level == "warning" and "MASTER_ADDR" in found.fix


def test_an_address_that_is_not_here():
    (found,) = host_checks.check_ports("192.0.2.1", None)  # for documentation (RFC 5737)
    assert found.level == "problem"


def test_shared_memory_that_is_not_there(tmp_path: Path):
    assert levels(host_checks.check_shared_memory(tmp_path / "shm")) == ["warning"]


SMALL = 'mount -t tmpfs -o size="$0" none /dev/shm && exec "$@"'


def can_mount() -> bool:
    command = ["unshare", "-rm", "sh", "-c", SMALL, "64m", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize(("size", "is_ok"), [("64m", False), ("1100m", True)])
def test_too_little_shared_memory(size: str, is_ok: bool):
    """A /dev/shm of its own: of Docker's default size, and of one that is enough."""
    if not can_mount():
        pytest.skip("no file system can be mounted")
    ask = (
        "from pathlib import Path; from parallel3d.doctor.host_checks import check_shared_memory as check; "
        "(found,) = check(Path('/dev/shm')); print(found.level, found.text, found.fix, sep='|')"
    )
    command = ["unshare", "-rm", "sh", "-c", SMALL, size, sys.executable, "-c", ask]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    level, text, fix = done.stdout.strip().split("|")
    assert text == f"{int(size[:-1]):,} MiB free in /dev/shm"
    assert (level, bool(fix)) == (("ok", False) if is_ok else ("warning", True)) and ("--shm-size" in fix) != is_ok


@pytest.mark.parametrize(("now", "skew", "level"), [(1e9, 0.0, "problem"), (2e9, -60.0, "warning"), (2e9, 0.1, "ok")])
def test_the_clock(now: float, skew: float, level: str):
    assert levels(host_checks.check_clock(now, skew)) == [level]


def test_the_clock_of_the_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 60)  # this host's clock is ahead of the file server's
    found = {finding.topic: finding for finding in host_checks.check_folder(tmp_path, None)}
    assert found["clock"].level == "warning" and "60 s behind" in found["clock"].text


def test_gpus_that_torch_does_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An nvidia-smi that lists two, before a torch for CPUs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200'\necho 'GPU 1: NVIDIA H200'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert count_driver_gpus() == 2
    facts = {"num_gpus": 0, "cuda": None, "nccl": None}
    (found,) = check_gpus_and_torch(facts, {})
    assert found.level == "problem" and "built for CPUs" in found.text
    (found,) = check_gpus_and_torch(facts, {"CUDA_VISIBLE_DEVICES": ""})
    assert found.level == "warning" and "CUDA_VISIBLE_DEVICES" in found.text


GPU_FACTS = {"num_gpus": 2, "gpus": ["NVIDIA H200"] * 2, "cuda": "13.0"}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (
            dict(GPU_FACTS, nccl="2.28.9"),
            [("GPUs", "ok", "2: NVIDIA H200; CUDA 13.0"), ("NCCL", "ok", "2.28.9")],
        ),
        (
            dict(GPU_FACTS, nccl=None),
            [("GPUs", "ok", "2: NVIDIA H200; CUDA 13.0"), ("NCCL", "warning", "missing in this build of torch")],
        ),
        (
            {"failure": "libcudart.so.13: cannot open shared object file"},
            [("torch", "problem", "importing it fails: libcudart.so.13: cannot open shared object file")],
        ),
    ],
)
def test_gpus_and_nccl(facts: dict[str, Any], expected: list[tuple[str, str, str]]):
    """From what torch would find where GPUs are."""
    found = list(check_gpus_and_torch(facts, {}))
    assert [(each.topic, each.level, each.text) for each in found] == expected
    assert all(bool(each.fix) == (each.level != "ok") for each in found)


def test_a_line():
    finding = Finding(topic="disk", level="problem", text="full", fix="free some")
    assert str(finding) == "problem  disk: full\n         -> free some"
