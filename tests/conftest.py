"""Parallel test workers take one thread each: more threads than cores make PyTorch's loops wait for one another."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # also for the processes that tests start

    import torch

    torch.set_num_threads(1)
