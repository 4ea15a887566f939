"""Small models are fastest on one thread, and by far where other processes use the cores."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
