"""Which device a rank takes, and which groups it then makes."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import parallel3d.worker.device as device_module
import parallel3d.worker.network as network_module
from parallel3d.config.schema import BatchConfig, Config, ModelConfig, OptimizerConfig, RunConfig
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.errors import ConfigError
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.group import SoloGroup
from parallel3d.parallel.staged_group import StagedGroup
from parallel3d.worker.device import choose_device, init_device
from parallel3d.worker.network import SocketNetwork


def config(device):
    return Config(
        model=ModelConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2),
        batch=BatchConfig(micro_batch_size=1, sequence_length=4),
        optimizer=OptimizerConfig(learning_rate=1.0),
        run=RunConfig(num_steps=1, device=device),
    )


@pytest.mark.parametrize(
    "wanted,num_devices,local_rank,local_world_size,device",
    [
        ("cpu", 8, 3, 4, "cpu"),
        ("auto", 0, 0, 1, "cpu"),
        ("auto", 4, 3, 4, "cuda:3"),
        ("auto", 2, 0, 4, "cpu"),
        ("auto", 2, 3, 4, "cpu"),
        ("cuda", 8, 3, 4, "cuda:3"),
        ("cuda", 2, 2, 4, None),
        ("cuda", 0, 0, 1, None),
        ("cuda_shared", 0, 0, 1, None),
        ("cuda_shared", 1, 3, 4, "cuda:0"),
        ("cuda_shared", 2, 3, 4, "cuda:1"),
    ],
)
def test_the_device_of_a_rank(monkeypatch, wanted, num_devices, local_rank, local_world_size, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    if device is None:
        with pytest.raises(ConfigError, match=f"local rank {local_rank} has no device: {num_devices} found"):
            choose_device(config(wanted), local_rank, local_world_size)
    else:
        assert choose_device(config(wanted), local_rank, local_world_size) == torch.device(device)


def test_taking_a_device_keeps_what_the_user_has_set(monkeypatch):
    taken, environment = [], {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(device_module.os, "environ", environment)
    init_device(torch.device("cpu"))
    assert not taken and environment.pop("TORCHINDUCTOR_COMPILE_THREADS") == "1" and len(environment) == 1
    init_device(torch.device("cuda", 1))
    assert taken == [torch.device("cuda", 1)]
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(
    "wanted,device,kinds",
    [
        ("cpu", "cpu", ("gloo", "gloo", "gloo")),
        ("cuda", "cuda:1", ("gloo", "nccl", "nccl")),
        ("auto", "cuda:1", ("gloo", "nccl", "nccl")),
        ("cuda_shared", "cuda:0", ("gloo", "staged gloo", "staged gloo")),
    ],
)
def test_the_groups_of_a_device(monkeypatch, wanted, device, kinds):
    """The group of all ranks reduces numbers of the host, whatever the device; a group of one needs no transport."""
    made = []

    def make(kind, **settings):
        made.append((kind, settings))
        group = SoloGroup(name=settings["name"])
        group.kind = kind
        return group

    monkeypatch.setattr(network_module, "GlooGroup", partial(make, "gloo"))
    monkeypatch.setattr(network_module, "NcclGroup", partial(make, "nccl"))
    links = []
    monkeypatch.setattr(network_module, "SocketLinks", lambda **settings: links.append(settings))
    context = SimpleNamespace(rank=1, address="127.0.0.1", control=None)
    network = SocketNetwork(config(wanted), context, torch.device(device))
    network._listener = SimpleNamespace()
    grid = Grid.uniform(tp_size=2, pp_size=1, dp_size=2)
    record = GenerationRecord(generation=0, grid=grid, previous=None, members=grid.ranks, addresses={})
    transports = network.transports(record, AbortToken())
    names = ("generation0/world", "generation0/dp/stage0/tp1", "generation0/tp/stage0/replica0")
    found = [transports.make_group(name, (0, 1)) for name in names]
    described = tuple(f"staged {group._host.kind}" if isinstance(group, StagedGroup) else group.kind for group in found)
    assert described == kinds
    assert all(settings["rank"] == 1 and settings["ranks"] == (0, 1) for _, settings in made)
    assert all(settings["device"] == torch.device(device) for kind, settings in made if kind == "nccl")
    assert isinstance(transports.make_group("generation0/tp/stage0/replica1", (1,)), SoloGroup) and len(made) == 3
    assert links[0]["pinned"] == (device != "cpu")
