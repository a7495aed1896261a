"""A training script as people write them, run as it is by torchrun and by `%ddp_run`.

    torchrun --nproc-per-node 2 digits.py --epochs 3 --out FOLDER

Each rank leaves a file of what it computed: every loss to the last bit, digests of the trained
parameters and of its buffers, and the seconds and CPU seconds from the first batch to the last.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    """8 x 8 pixels to ten digits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.head(self.features(images))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The same for tensors that are the same to the last bit."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Train, and write down what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1797, help="all of them")
    parser.add_argument(
        "--data", type=Path, help="a file with images and labels, not scikit-learn's"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)  # torchrun's default, whatever the number of cores
    torch.manual_seed(7)
    if arguments.data:
        with np.load(arguments.data) as kept:
            images, labels = kept["images"], kept["labels"]
    else:
        from sklearn.datasets import load_digits  # seconds, on each rank

        images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(pixels[: arguments.samples], torch.tensor(labels[: arguments.samples]))
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(Net(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(11 + dist.get_rank())  # each rank drops out others
    losses = []
    began, cpu_began = time.monotonic(), time.process_time()
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        losses.append(mean.item().hex())
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu_began
    found = {
        "losses": losses,
        "parameters": digest(model.parameters()),
        "buffers": digest(model.buffers()),
        "seconds": seconds,
        "cpu_seconds": cpu,
    }
    (arguments.out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()  # a rank that ends badly from here on takes no other's record with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
