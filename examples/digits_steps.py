"""The same training by elastic.steps, which has a place for what is done once a step, such as its loss."""

import digits
import torch
from torch.nn import functional

from parallel3d import elastic

options = digits.parse_arguments()
elastic.init(options.workers, directory=options.directory, seed=options.seed, max_rejoins=options.rejoins)
torch.manual_seed(options.seed)
training, test = digits.make_data(options.data)
network = digits.make_network()
optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
model = elastic.DataParallel(network, optimizer, sums="exact")
sampler = elastic.Sampler(training, slot_size=64, batch_size=256, seed=options.seed)
for step in elastic.steps(sampler, epochs=options.epochs):
    for x, y in step:
        loss = functional.cross_entropy(model(x), y)
        step.add_loss(loss)
        loss.backward()
    optimizer.step()
digits.report(network, training, test)
