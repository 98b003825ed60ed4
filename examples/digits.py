"""Digits and a small convolutional network: what the scripts beside this file train on.

The digits are drawn, not collected: those of a font that Pillow brings, turned, moved and scaled by chance, with noise.
`--data handwritten` takes scikit-learn's 1,797 (as many are drawn), enlarged from 8 x 8 to 12 x 12 pixels. The network
has the form of PyTorch's MNIST example with a quarter of its channels: two convolutions, dropout, two linear layers.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

NUM_DIGITS, NUM_TRAINING, SIZE = 1797, 1536, 12


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on drawn digits.")
    parser.add_argument("--directory", default="runs/digits", help="of metrics.jsonl and logs")
    parser.add_argument("--workers", type=int, default=4, help="without a launcher")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data", choices=("drawn", "handwritten"), default="drawn", help="those need scikit-learn")
    parser.add_argument("--rejoins", type=int, default=3, help="how often a lost worker is replaced")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_data(name: str = "drawn") -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the test set, the same in every process."""
    x, y = draw_digits() if name == "drawn" else load_digits()
    return TensorDataset(x[:NUM_TRAINING], y[:NUM_TRAINING]), TensorDataset(x[NUM_TRAINING:], y[NUM_TRAINING:])


def draw_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images (digits, 1, SIZE, SIZE), about 0 to 1, and labels (digits,)."""
    chance = np.random.default_rng(0)
    labels = chance.integers(0, 10, NUM_DIGITS)
    images = np.stack([draw(int(label), chance) for label in labels])
    return torch.from_numpy(images).float().unsqueeze(1), torch.from_numpy(labels)


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns handwritten ones in the same form."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.from_numpy(bunch.images / 16).float().unsqueeze(1)
    return functional.interpolate(images, size=SIZE, mode="bilinear"), torch.from_numpy(bunch.target).long()


def draw(label: int, chance: np.random.Generator) -> np.ndarray:
    image = Image.new("L", (SIZE, SIZE))
    place = chance.uniform(1.0, 5.0), chance.uniform(-2.0, 1.0)
    ImageDraw.Draw(image).text(place, str(label), fill=255, font=ImageFont.load_default(chance.uniform(9.0, 12.0)))
    turned = np.asarray(image.rotate(chance.uniform(-20.0, 20.0), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    return turned + chance.normal(0.0, 0.2, turned.shape)


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


@torch.no_grad()
def report(network: nn.Module, digits: TensorDataset, test: TensorDataset) -> None:
    """Prints how well the network does."""
    network.eval()
    loss = functional.cross_entropy(network(digits.tensors[0]), digits.tensors[1])
    share = (network(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean()
    bits = torch.cat([each.reshape(-1).view(torch.int32).long() for each in network.parameters()])
    checksum = int((bits * torch.arange(1, len(bits) + 1)).sum())
    print(f"training loss {loss:.6f}, test accuracy {share:.4f}, weights {checksum:x}", flush=True)
    network.train()
