"""Without Triton its kernels have no tests; with it, memory that nobody wrote is NaN."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN, so an output that a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
