"""Common ground of all tests: one torch thread for each rank, property tests that are the same in every run."""

import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")
torch.set_num_threads(1)
settings.register_profile("steady", deadline=None, derandomize=True)  # a busy machine is no failure
settings.load_profile("steady")
