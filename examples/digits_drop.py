"""Elastic, but no sample is computed twice: `python examples/digits_drop.py`. Lost ones return an epoch later."""

import digits
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from parallel3d import elastic

options = digits.parse_arguments()
elastic.init(options.workers, directory=options.directory, seed=options.seed, max_rejoins=options.rejoins)
torch.manual_seed(options.seed)
training, test = digits.make_data(options.data)
network = digits.make_network()
optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
model = elastic.DataParallel(network, optimizer)
sampler = elastic.Sampler(training, slot_size=64, on_failure="drop", seed=options.seed)
loader = DataLoader(training, batch_size=64, sampler=sampler)
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
digits.report(network, training, test)
