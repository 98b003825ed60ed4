"""What a run's leader publishes about its device, until it stands in environment.json."""

import io
import json

import torch

from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.inprocess.world import ThreadWorld, run_threads
from parallel3d.monitor.run_folder import RunFolder
from parallel3d.monitor.sinks import RunReporter
from parallel3d.trainer.context import Transports
from parallel3d.trainer.plans import build_grid
from parallel3d.worker import run_report
from parallel3d.worker.run_report import RunReport
from tests.support.tiny_runs import build, make_config

H200 = {"device": "NVIDIA H200", "driver": "570.86.15", "nccl": "2.27.5"}


def published(**changes):
    """By rank, what two replicas publish when their first generation begins."""
    config = make_config(parallel=dict(dp_size=2), monitor=dict(peak_flops=1e9), **changes)
    grid = build_grid(config)
    first = GenerationRecord(
        generation=0, grid=grid, previous=None, members=grid.ranks, hosts=dict.fromkeys(grid.ranks, "a"), addresses={}
    )

    def body(number, world):
        transports = Transports(
            make_group=world.make_group(number), links=world.links(number), token=world.tokens[number]
        )
        rank, records = build(config, grid, number, transports), []
        RunReport(rank, None, records.append, is_restart=True).on_generation(first)
        return records

    return run_threads(2, body, world=ThreadWorld(2))


def test_the_leaders_gpu_is_named_in_the_environment_of_the_run(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(run_report, "describe_device", lambda device: asked.append(device) or H200)
    leader, other = published()
    assert asked == [torch.device("cpu")] and not other
    folder = RunFolder(tmp_path, config="{}", environment={"python": "3.12"})
    report = RunReporter(folder, title="small", out=io.StringIO(), err=io.StringIO())
    report.start()
    for record in leader:
        report.publish(record)
    report.close("", exit_code=0)
    assert json.loads((tmp_path / "environment.json").read_text()) == {"python": "3.12", **H200}


def test_a_cpu_is_described_by_the_launcher_alone():
    leader, _ = published()
    assert {"total", "round_trip"} <= {record["kind"] for record in leader}
    assert not any(record["kind"] == "environment" for record in leader)
