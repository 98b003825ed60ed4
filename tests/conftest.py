"""Common ground of all tests: one torch thread for each rank."""

import torch

torch.set_num_threads(1)
