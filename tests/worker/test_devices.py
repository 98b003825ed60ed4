"""Which device a rank takes, and which groups it then makes."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import parallel3d.worker.device as device_module
import parallel3d.worker.network as network_module
from parallel3d.config.schema import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from parallel3d.elastic.protocol.membership import GenerationRecord
from parallel3d.errors import ConfigError
from parallel3d.parallel.abort import AbortToken
from parallel3d.parallel.grid import Grid
from parallel3d.parallel.group import SoloGroup
from parallel3d.parallel.staged_group import StagedGroup
from parallel3d.worker.device import (
    _driver_version,
    are_own_devices,
    choose_device,
    describe_device,
    exchange_device_ids,
    init_device,
)
from parallel3d.worker.network import SocketNetwork


def config(device, *, p2p="auto", document_mask=False):
    return Config(
        model=ModelConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2),
        batch=BatchConfig(micro_batch_size=1, sequence_length=4),
        optimizer=OptimizerConfig(learning_rate=1.0),
        data=DataConfig(document_mask=document_mask),
        run=RunConfig(num_steps=1, device=device, p2p=p2p),
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


class Store:
    """The values that the workers of one host have set."""

    def __init__(self, values):
        self.values, self.token = values, None

    def set(self, key, value):
        self.values[key] = value

    def get_all(self, keys, token):
        return [self.values[key] for key in keys]


@pytest.mark.parametrize(
    "ids, own",
    [
        (["GPU-a", "GPU-b"], True),  # srun --gpus-per-task=1
        (["GPU-a", "GPU-a"], False),  # CUDA_VISIBLE_DEVICES=0 for all
        (["GPU-a", ""], False),  # another sees several or none
    ],
)
def test_a_launcher_may_show_each_process_its_own_gpu(monkeypatch, ids, own):
    store = Store({"device/here/0": b"GPU-a"})  # set again by the other worker, who asks last and finds both

    def ask(local_rank):
        seen = ids[local_rank]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if seen else 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=seen))
        return exchange_device_ids(
            SimpleNamespace(control=store, host="here", local_rank=local_rank, local_world_size=2)
        )

    found = [ask(local_rank) for local_rank in (1, 0)][-1]
    assert are_own_devices(found, 2) == own
    if own:
        for wanted in ("auto", "cuda", "cuda_shared"):
            assert choose_device(config(wanted), 1, 2, has_own_device=own) == torch.device("cuda", 0)
        assert choose_device(config("cpu"), 1, 2, has_own_device=own) == torch.device("cpu")


def test_one_worker_alone_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="GPU-a"))
    context = SimpleNamespace(control=Store({}), host="here", local_rank=0, local_world_size=1)
    assert not are_own_devices(exchange_device_ids(context), 1)


@pytest.fixture
def cuda_calls(monkeypatch):
    """A process with an environment and no device, and what torch is asked for."""
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", lambda text: calls.append(("allocator", text)))
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: calls.append(("deterministic", on)))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(device_module.os, "environ", {})
    return calls


def test_holes_in_a_full_device_are_avoided_unless_the_user_has_settings(cuda_calls):
    init_device(torch.device("cuda", 1))
    assert cuda_calls == [("allocator", "expandable_segments:True"), ("device", torch.device("cuda", 1))]
    device_module.os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
    init_device(torch.device("cuda", 1))
    assert cuda_calls[2:] == [("device", torch.device("cuda", 1))]


def test_the_environment_names_device_driver_and_libraries(monkeypatch, tmp_path):
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=2**37, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\nGCC version: 12\n")
    monkeypatch.setattr(device_module, "_driver_version", partial(_driver_version, tmp_path / "version"))
    facts = describe_device(torch.device("cuda", 0))
    assert facts["device"] == "NVIDIA H200" and facts["device_capability"] == "9.0" and facts["nccl"] == "2.27.5"
    assert facts["driver"] == "NVIDIA UNIX x86_64 Kernel Module  570.86.15" and facts.keys() >= {"cuda", "cudnn"}
    assert _driver_version(tmp_path / "none") is None and describe_device(torch.device("cpu")) == {}


def test_a_deterministic_device(cuda_calls):
    init_device(torch.device("cpu"), deterministic=True)
    assert cuda_calls == [] and torch.utils.deterministic.fill_uninitialized_memory
    init_device(torch.device("cuda", 0), deterministic=True)
    assert ("deterministic", True) in cuda_calls and not torch.utils.deterministic.fill_uninitialized_memory
    assert device_module.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_compiled_kernels_have_a_folder(cuda_calls):
    environment = device_module.os.environ
    environment["TRITON_CACHE_DIR"] = "/mine"
    init_device(torch.device("cpu"), kernels=Path("/kernels"))
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == "/kernels/inductor"
    assert environment["TRITON_CACHE_DIR"] == "/mine", "as the user has set it"


def test_taking_a_device_keeps_what_the_user_has_set(monkeypatch):
    taken, environment = [], {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", lambda text: None)
    monkeypatch.setattr(device_module.os, "environ", environment)
    init_device(torch.device("cpu"))
    assert not taken and environment.pop("TORCHINDUCTOR_COMPILE_THREADS") == "1" and len(environment) == 1
    init_device(torch.device("cuda", 1))
    assert taken == [torch.device("cuda", 1)]
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environment["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"


def first_transports(config, device, hosts, pp_size):
    """Those of rank 1 in the first generation of a run on one host or two, which it opens without a listener."""
    context = SimpleNamespace(rank=1, address="127.0.0.1", secret=b"", control=None)
    network = SocketNetwork(config, context, torch.device(device))
    network._listener = SimpleNamespace()
    grid = Grid.uniform(tp_size=2, pp_size=pp_size, dp_size=2)
    record = GenerationRecord(
        generation=0, grid=grid, previous=None, members=grid.ranks, hosts=dict(enumerate(hosts)), addresses={}
    )
    return network.transports(record, AbortToken())


@pytest.mark.parametrize(
    "wanted,device,hosts,pp_size,kinds",
    [
        ("cpu", "cpu", "ab", 1, ("tree", "gloo", "gloo")),
        ("cpu", "cpu", "aa", 1, ("tree", "memory", "memory")),
        ("cpu", "cpu", "aa", 2, ("tree", "memory", "memory")),
        ("cuda", "cuda:1", "aa", 1, ("tree", "nccl", "nccl")),
        ("auto", "cuda:1", "aa", 1, ("tree", "nccl", "nccl")),
        ("cuda_shared", "cuda:0", "aa", 1, ("tree", "staged gloo", "staged gloo")),
    ],
)
def test_the_groups_of_a_device(monkeypatch, wanted, device, hosts, pp_size, kinds):
    """The group of all ranks reduces numbers of the host, whatever the device; a group of one needs no transport."""
    made = []

    def make(kind, **settings):
        made.append((kind, settings))
        group = SoloGroup(name=settings["name"])
        group.kind = kind
        return group

    monkeypatch.setattr(network_module, "GlooGroup", partial(make, "gloo"))
    monkeypatch.setattr(network_module, "TreeGroup", partial(make, "tree"))
    monkeypatch.setattr(network_module, "NcclGroup", partial(make, "nccl"))
    monkeypatch.setattr(network_module, "SharedMemoryGroup", partial(make, "memory"))
    monkeypatch.setattr(network_module, "share_memory", lambda *args, **settings: object())
    links = []

    def make_links(**settings):
        links.append(settings)
        return SimpleNamespace(streams=None)

    monkeypatch.setattr(network_module, "SocketLinks", make_links)
    transports = first_transports(config(wanted), device, hosts, pp_size)
    names = ("generation0/world", "generation0/dp/stage0/tp1", "generation0/tp/stage0/replica0")
    found = [transports.make_group(name, (0, 1)) for name in names]
    described = tuple(f"staged {group._host.kind}" if isinstance(group, StagedGroup) else group.kind for group in found)
    assert described == kinds
    assert all(settings["rank"] == 1 and settings["ranks"] == (0, 1) for _, settings in made)
    assert all(settings["device"] == torch.device(device) for kind, settings in made if kind == "nccl")
    assert isinstance(transports.make_group("generation0/tp/stage0/replica1", (1,)), SoloGroup) and len(made) == 3
    accelerator = links[0]["accelerator"]
    assert (torch.device("cpu") if accelerator is None else accelerator.device) == torch.device(device)


@pytest.mark.parametrize(
    "wanted,device,settings,expected",
    [
        ("cuda", "cuda:1", {}, True),
        ("auto", "cuda:1", {}, True),
        ("cuda", "cuda:1", {"p2p": "nccl"}, True),
        ("cuda", "cuda:1", {"p2p": "host"}, False),
        ("cuda", "cuda:1", {"document_mask": True}, False),
        ("cuda_shared", "cuda:0", {}, False),
        ("auto", "cpu", {}, False),
        ("auto", "cpu", {"p2p": "nccl"}, False),  # auto has found no GPU
        ("cpu", "cpu", {}, False),
    ],
)
def test_which_stages_send_from_gpu_to_gpu(monkeypatch, wanted, device, settings, expected):
    monkeypatch.setattr(network_module, "SocketLinks", lambda **settings: SimpleNamespace(streams=None))
    monkeypatch.setattr(network_module, "NcclGroup", SimpleNamespace)
    make_pair = first_transports(config(wanted, **settings), device, "aa", 2).make_pair
    assert (make_pair is not None) == expected
    if make_pair is not None:
        group = make_pair("generation0/pair", (1, 3))
        assert (group.rank, group.ranks, group.device) == (0, (1, 3), torch.device(device))


@pytest.mark.parametrize(("workers", "expected"), [(1, 6), (2, 3), (4, 1), (9, 1)])
def test_workers_of_a_host_share_the_cores_that_it_may_use(monkeypatch, workers, expected):
    """Those of a container, where it has fewer than the machine."""
    monkeypatch.setattr(device_module, "usable_cores", lambda: 6)
    assert device_module.choose_num_threads(config("cpu"), workers) == expected
    exact = config("cpu").model_copy(update={"precision": PrecisionConfig(sums="exact")})
    assert device_module.choose_num_threads(exact, workers) == 1
