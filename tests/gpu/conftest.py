"""These tests are collected everywhere and run where there is a CUDA device."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; tests/interpreted runs this suite under Triton's interpreter")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 would run the kernels on the CPU")
    return "cuda"
