"""A script for torch's DistributedDataParallel: `torchrun --nproc_per_node 4 examples/digits_ddp.py`."""

import digits
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

options = digits.parse_arguments()
dist.init_process_group("gloo")
torch.manual_seed(options.seed)
training, test = digits.make_data(options.data)
network = digits.make_network()
optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
model = DistributedDataParallel(network)
sampler = DistributedSampler(training, seed=options.seed)
loader = DataLoader(training, batch_size=64, sampler=sampler)
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
digits.report(network, training, test)
dist.destroy_process_group()
