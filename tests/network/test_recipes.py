"""The recipes' own commands, on hosts that are network namespaces, with the variables that their platforms set."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.launch_runs import metrics
from tests.support.network_hosts import Host, Network, network_of
from tests.support.network_switch import Weather

RECIPES = Path(__file__).parents[2] / "recipes"
TIMEOUT_S = 200
SLOW = Weather(delay_s=0.01)
"""So that a run has some hundred steps in its time."""
TRACES = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_|OMPI_|PMI_|PMIX_|TORCHELASTIC_")


class Cluster:
    """Hosts that run one recipe's command, with a configuration and a folder that all share."""

    def __init__(self, network: Network, folder: Path, text: Path, num_steps: int):
        self.network, self.run, self._config = network, folder / "run", folder / "run.json"
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._num_steps = num_steps
        self._config.write_text(json.dumps(small_run(len(network.hosts), self.run, text, num_steps)))

    def start(self, host: Host, command: str, **variables: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not TRACES.match(name)}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        shared = {"CONFIG": str(self._config), "RUN": str(self.run), "OMP_NUM_THREADS": "1"}
        environment = {**kept, "PATH": path, "PYTHONPATH": str(RECIPES.parent), **shared, **variables}
        self.processes[host.number] = host.popen(["bash", "-c", command], env=environment)

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what}: {self._kill()}"
            time.sleep(0.05)

    def num_steps(self) -> int:
        return len(metrics(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def changes(self) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines())
        return [line for line in lines if line.get("event") == "membership"]

    def end(self) -> set[int]:
        """Waits for the end of all commands; returns their exit codes."""
        self.wait(lambda: all(process.poll() is not None for process in self.processes.values()), "end")
        return {process.returncode for process in self.processes.values()}

    def assert_whole(self) -> None:
        assert self.end() == {0}
        assert [line["step"] for line in metrics(self.run)] == list(range(1, self._num_steps + 1))

    def _kill(self) -> list[str]:
        for host in self.network.hosts:
            host.kill_all()
        return [process.communicate(timeout=300)[0] for process in self.processes.values()]


MakeCluster = Callable[..., Cluster]


def small_run(num_hosts: int, directory: Path, text: Path, num_steps: int) -> dict[str, Any]:
    model = dict(vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return {
        "model": model,
        "parallel": {"pp_size": 1, "dp_size": num_hosts},
        "batch": {"global_batch_size": 6, "micro_batch_size": 1, "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-2},
        "data": {"sources": [str(text)], "cache_directory": str(text.parent / "cache")},
        "monitor": {"charts": False},
        "elastic": {"control_timeout_s": 6.0},
        "run": {"num_steps": num_steps, "threads_per_rank": 1, "evaluate_batches": 1, "directory": str(directory)},
    }


@pytest.fixture
def cluster(_namespaces: None, tmp_path: Path, text: Path) -> Iterator[MakeCluster]:
    contexts = []

    def make(num_hosts: int, num_steps: int = 60) -> Cluster:
        contexts.append(network_of(num_hosts))
        return Cluster(contexts[-1].__enter__(), tmp_path, text, num_steps)

    yield make
    for context in contexts:
        context.__exit__(None, None, None)


def test_recipes_are_well_formed():
    service, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    values = {each["name"]: each["value"] for each in container["env"]}
    assert int(values["NUM_HOSTS"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(values["GPUS_PER_HOST"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert values["MASTER"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    steps = [line.split()[0] for line in (RECIPES / "Dockerfile").read_text().splitlines() if line[:1].isupper()]
    assert steps == ["ARG", "FROM", "RUN", "WORKDIR", "COPY", "RUN", "WORKDIR", "ENTRYPOINT", "CMD"]
    subprocess.run(["bash", "-n", str(RECIPES / "slurm.sbatch")], check=True)


def docker_ignored() -> tuple[set[str], list[str]]:
    """What .dockerignore names: in the top folder, and anywhere (without **/)."""
    lines = (RECIPES.parent / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and line[0] != "#"]
    tops = {name for name in patterns if not name.startswith("**/")}
    return tops, [name.removeprefix("**/") for name in patterns if name not in tops]


def is_ignored(path: Path) -> bool:
    """Of a path below the checkout."""
    tops, anywhere = docker_ignored()
    return path.parts[0] in tops or any(fnmatch(part, name) for part in path.parts for name in anywhere)


def test_the_image_has_nothing_that_git_ignores():
    """`COPY . .` leaves out .git and what .gitignore names; the sources, which the image needs, stay."""
    root = RECIPES.parent
    tops, anywhere = docker_ignored()
    lines = (line.strip() for line in (root / ".gitignore").read_text().splitlines())
    names = [line.rstrip("/") for line in lines if line and line[0] != "#"]
    assert tops == {".git"} | {name.removeprefix("/") for name in names if name.startswith("/")}
    assert set(anywhere) == {name for name in names if not name.startswith("/")}
    for path in (*root.glob("parallel3d/**/*.py"), *root.glob("configs/**/*.json"), root / "constraints.txt"):
        assert not is_ignored(path.relative_to(root)), path


@pytest.mark.slow
@pytest.mark.full
def test_the_steps_of_the_image(tmp_path: Path):
    """From what `COPY . .` takes the installing line makes the command that the image runs; without Docker, Debian's
    packages and those of PyPI, which are here already."""
    lines = (RECIPES / "Dockerfile").read_text().splitlines()
    steps = [tuple(line.split(maxsplit=1)) for line in lines if line[:1].isupper()]
    assert ("COPY", ". .") in steps
    image, data, site = tmp_path / "image", tmp_path / "data", tmp_path / "site"
    data.mkdir()

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if is_ignored(Path(folder, name).relative_to(RECIPES.parent))}

    shutil.copytree(RECIPES.parent, image, symlinks=True, ignore=left_out)
    (install,) = [words for step, words in steps if step == "RUN" and words.startswith("pip install ")]
    here = f"{shlex.quote(sys.executable)} -m pip install --no-deps --no-index --no-build-isolation --quiet"
    shell = f"{here} --target {shlex.quote(str(site))} {install.removeprefix('pip install ')}"
    done = subprocess.run(["sh", "-c", shell], cwd=image, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    entry, words = (json.loads(dict(steps)[step]) for step in ("ENTRYPOINT", "CMD"))
    command = [sys.executable, str(site / "bin" / entry[0]), *entry[1:], *words]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=data, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and "train" in done.stdout and "doctor" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("code", "is_queued_again"), [(0, False), (3, False), (7, True)])
def test_slurm_queues_a_job_again_that_was_interrupted(tmp_path: Path, code: int, is_queued_again: bool):
    """The batch script as bash runs it, srun and scontrol being scripts that write down what they are given."""
    for name, status in (("srun", code), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/calls"\nexit {status}\n')
        (tmp_path / name).chmod(0o755)
    known = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CONFIG": "/shared/a run.json", "SLURM_JOB_ID": "42"}
    done = subprocess.run(["bash", str(RECIPES / "slurm.sbatch")], env=known, capture_output=True, text=True)
    assert done.returncode == code and done.stderr == ""
    srun, *others = (tmp_path / "calls").read_text().splitlines()
    assert "-m parallel3d train --config /shared/a run.json run.resume=auto" in srun
    assert others == (["scontrol requeue 42"] if is_queued_again else [])


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize(("victim", "is_evicted"), [(3, False), (1, False), (2, True), (1, True)])
def test_a_pod_is_replaced(cluster: MakeCluster, victim: int, is_evicted: bool):
    """By the Job, with the same command: it joins the run that goes on, and the run ends whole. The first pod has the
    coordinator. A worker whose pod is evicted, by SIGTERM to the first process, leaves at a step boundary, and with it
    a coordinator that is there."""
    _, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    (command,) = container["args"]
    pods = cluster(3, num_steps=300)
    pods.network.weather = SLOW

    def start(host: Host) -> None:
        index = {"JOB_COMPLETION_INDEX": str(host.number - 1)}
        pods.start(host, command, NUM_HOSTS="3", GPUS_PER_HOST="1", MASTER="host1", **index)

    for host in pods.network.hosts:
        start(host)
    pods.wait(lambda: pods.num_steps() >= 5, "fifth step")
    lost = pods.network.hosts[victim - 1]
    if is_evicted:
        pods.processes[victim].terminate()
        pods.wait(lambda: [change["live"] for change in pods.changes()][-1:] == [2], "departure")
        assert not any("guardian" in change["why"] for change in pods.changes())  # nothing was lost
    lost.kill_all()  # where a pod is evicted, at the end of its grace period
    pods.wait(lambda: pods.changes(), "loss")
    start(lost)
    pods.wait(lambda: pods.changes()[-1]["live"] == 3, "return")
    pods.assert_whole()


@pytest.mark.slow
@pytest.mark.full
def test_slurm_takes_a_job_away(cluster: MakeCluster):
    """The task's command of the batch script, with srun's variables: USR1 to all tasks ends the run with code 7, and
    the same command goes on from what it has saved."""
    (srun,) = re.findall(r"^srun \S+ (.*) \|\| ", (RECIPES / "slurm.sbatch").read_text(), flags=re.MULTILINE)
    tasks = cluster(2)

    def start(host: Host) -> None:
        variables = dict(SLURM_PROCID=str(host.number - 1), SLURM_LOCALID="0", SLURM_STEP_NUM_TASKS="2")
        variables |= dict(SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_STEP_NODELIST="host[1-2]")
        variables |= dict(SLURM_STEP_TASKS_PER_NODE="1(x2)")
        tasks.start(host, f"exec {srun}", SLURM_NODEID=str(host.number - 1), **variables)

    for host in tasks.network.hosts:
        start(host)
    tasks.network.weather = SLOW
    tasks.wait(lambda: tasks.num_steps() >= 5, "fifth step")
    for process in tasks.processes.values():
        process.send_signal(signal.SIGUSR1)
    assert tasks.end() == {7} and tasks.num_steps() < 60
    tasks.network.weather = Weather()
    for host in tasks.network.hosts:
        start(host)
    tasks.assert_whole()


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.sample(0, rest=1)
@pytest.mark.parametrize("is_lost", [True, False])
def test_skypilot(cluster: MakeCluster, is_lost: bool):
    """From start to end, or with the last of three machines lost: the same command, run again in its place, joins."""
    command = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())["run"]
    num_nodes = 3 if is_lost else 2
    nodes = cluster(num_nodes, num_steps=500 if is_lost else 60)
    addresses = "\n".join(host.address for host in nodes.network.hosts)

    def start(host: Host) -> None:
        sky = dict(SKYPILOT_NODE_RANK=str(host.number - 1), SKYPILOT_NUM_NODES=str(num_nodes))
        sky |= dict(SKYPILOT_NODE_IPS=addresses, SKYPILOT_NUM_GPUS_PER_NODE="1")
        nodes.start(host, command, CLOUD="aws", **sky)

    for host in nodes.network.hosts:
        start(host)
    if is_lost:
        nodes.network.weather = SLOW
        nodes.wait(lambda: nodes.num_steps() >= 5, "fifth step")
        lost = nodes.network.hosts[-1]
        lost.kill_all()
        nodes.wait(lambda: nodes.changes(), "loss")
        start(lost)
        nodes.wait(lambda: nodes.changes()[-1]["live"] == 3, "return")
        nodes.network.weather = Weather()
    nodes.assert_whole()
