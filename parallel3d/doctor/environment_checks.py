"""Checks of what a run starts with: packages, the launcher's variables, GPUs, the C compiler and its cache."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from parallel3d.doctor.finding import Finding
from parallel3d.elastic.guardian.launcher_env import LauncherEnv, read_launcher_env
from parallel3d.errors import LaunchError
from parallel3d.monitor.environment import describe_environment

REQUIRED = (
    *("torch", "numpy", "safetensors", "sentencepiece", "tokenizers", "pyarrow", "zstandard", "pydantic"),
    *("tqdm", "matplotlib", "fsspec"),
)
"""Packages of pyproject.toml; a test compares them."""
OLDEST_TORCH = (2, 11)
FACTS_TIMEOUT_S = 120.0
SMI_TIMEOUT_S = 30.0
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_packages() -> Iterator[Finding]:
    """Versions of Python and of the packages that a run imports."""
    facts = describe_environment([])
    yield Finding(topic="host", text=f"{facts['host']}, {facts['platform']}, {facts['cpu_model']}")
    versions: dict[str, str] = {}
    for name in REQUIRED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            text, fix = f"{name} is not installed in {sys.prefix}", f"pip install {name}"
            yield Finding(topic="packages", level="problem", text=text, fix=fix)
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Finding(topic="packages", text=f"Python {facts['python']}, {found}")
    numbers = tuple(map(int, re.findall(r"\d+", versions.get("torch", ""))[:2]))
    if numbers and numbers < OLDEST_TORCH:
        fix = f"pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'"
        yield Finding(topic="packages", level="problem", text=f"torch {versions['torch']} is too old", fix=fix)


def read_launcher(variables: Mapping[str, str]) -> tuple[LauncherEnv | None, Finding]:
    """The launcher that started this process, if one did; and a finding on its variables."""
    try:
        env = read_launcher_env(variables)
    except LaunchError as error:
        text, _, fix = str(error).partition(": ")
        return None, Finding(topic="launcher", level="problem", text=text, fix=fix or "unset the variable")
    if env is None:
        job = variables.get("SLURM_JOB_ID")
        text = "none: train starts its workers on this host"
        text += f", although SLURM's job {job} may have others (srun starts them there)" if job else ""
        return None, Finding(topic="launcher", text=text)
    text = f"rank {env.rank} of {env.world_size}, rank 0 at {env.master_addr}:{env.master_port}"
    return env, Finding(topic="launcher", text=text)


def check_interfaces(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Network interfaces that variables name: `eth` stands for all that begin so, `=eth0` for one, `^lo` for others."""
    there = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACE_VARIABLES:
        words = variables.get(variable)
        if words is None or words.startswith("^"):
            continue
        wanted = [word.partition(":")[0] for word in words.removeprefix("=").split(",")]
        if not any(name.startswith(word) for name in there for word in wanted if word):
            fix = f"unset it, or name one of {', '.join(there)}"
            yield Finding(topic=variable, level="problem", text=f"{words!r} is not an interface of this host", fix=fix)


def find_torch_facts(variables: Mapping[str, str]) -> dict[str, Any]:
    """What torch finds here, by a process of its own; `failure` if it ends otherwise than it should."""
    command = [sys.executable, str(Path(__file__).with_name("torch_facts.py"))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FACTS_TIMEOUT_S, env=dict(variables))
    except subprocess.TimeoutExpired:
        return {"failure": f"no answer in {FACTS_TIMEOUT_S:.0f} s"}
    try:
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts
    except (ValueError, IndexError):
        return {"failure": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def check_gpus_and_torch(facts: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[Finding]:
    """torch itself; the GPUs that the driver shows against those that torch finds; NCCL."""
    if "failure" in facts:
        text, fix = f"importing it fails: {facts['failure']}", "pip install --force-reinstall torch"
        yield Finding(topic="torch", level="problem", text=text, fix=fix)
        return
    driver, num_gpus, visible = count_driver_gpus(), facts["num_gpus"], variables.get("CUDA_VISIBLE_DEVICES")
    if not driver and not num_gpus:
        yield Finding(topic="GPUs", text="none: runs are on the CPU")
    elif num_gpus:
        yield Finding(topic="GPUs", text=f"{num_gpus}: {', '.join(sorted(set(facts['gpus'])))}; CUDA {facts['cuda']}")
    elif visible is not None:
        text = f"CUDA_VISIBLE_DEVICES={visible!r} hides all {driver}"
        yield Finding(topic="GPUs", level="warning", text=text, fix="unset it, or list some: 0,1")
    else:
        why = facts.get("error", f"it is built for CUDA {facts['cuda']}" if facts["cuda"] else "it is built for CPUs")
        text = f"the driver has {driver}, torch finds none ({why})"
        fix = "install a build of torch for CUDA, no newer than the driver (nvidia-smi shows the version it supports)"
        yield Finding(topic="GPUs", level="problem", text=text, fix=fix)
    if num_gpus and facts["nccl"] is None:
        fix = "install a build of torch with NCCL; with one GPU a run needs none"
        yield Finding(topic="NCCL", level="warning", text="missing in this build of torch", fix=fix)
    elif num_gpus:
        yield Finding(topic="NCCL", text=str(facts["nccl"]))


def count_driver_gpus() -> int:
    """The GPUs that nvidia-smi lists; 0 without it."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0


def check_compiler(facts: Mapping[str, Any], cache: Path) -> Iterator[Finding]:
    """The C compiler of the kernels for CPUs, and the folder that keeps what it made."""
    if shutil.which("cc") is None:
        fix = "install one (apt install gcc libc6-dev): without it CPUs run torch's operators, which are slower"
        yield Finding(topic="C compiler", level="warning", text="cc is not in PATH", fix=fix)
    elif facts.get("has_c_loops") is False:
        fix = "cc -fopenmp must compile and link: install gcc with libgomp, or clang with libomp"
        yield Finding(topic="C compiler", level="warning", text="cc does not compile the loops", fix=fix)
    elif "has_c_loops" in facts:
        yield Finding(topic="C compiler", text=f"{shutil.which('cc')} compiles the loops")
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
        yield Finding(topic="C cache", text=str(cache))
    except OSError as error:
        fix = "set HOME to a folder that can be written to: meanwhile every process compiles for itself"
        yield Finding(topic="C cache", level="warning", text=f"{cache}: {error.strerror}", fix=fix)
