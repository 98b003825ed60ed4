"""Numbers of several formats are read together, each part by the one who added it."""

import pytest
import torch

from parallel3d.parallel import host_numbers
from parallel3d.parallel.host_numbers import HostNumbers


def test_each_reader_gets_its_numbers():
    numbers = HostNumbers()
    tensors = [torch.tensor([0.1, 2.0]), torch.zeros(0), torch.tensor(1 / 3, dtype=torch.float64), torch.ones(2, 1)]
    readers = [numbers.add(tensor) for tensor in tensors]
    readers += [numbers.add_all([torch.tensor(5.0), torch.tensor(6.0)]), numbers.add_all([])]
    with pytest.raises(AssertionError, match="before they were read"):
        readers[0]()
    numbers.read()
    expected = [*(tensor.double().reshape(-1).tolist() for tensor in tensors), [5.0, 6.0], []]
    assert [read() for read in readers] == expected


def test_there_is_one_copy(monkeypatch):
    copies = []

    class Copy(host_numbers.HostCopy):
        def read(self):
            copies.append(self)
            return super().read()

    monkeypatch.setattr(host_numbers, "HostCopy", Copy)
    numbers = HostNumbers()
    for number in range(5):
        numbers.add(torch.tensor([float(number)]))
    numbers.read()
    assert len(copies) == 1
    HostNumbers().read()
    assert len(copies) == 1  # nothing to read
