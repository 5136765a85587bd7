"""Training that survives the loss of a node: the next attempt continues from the last checkpoint.

usage: python examples/training/checkpoint_resume.py
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import skyward as sky

EPOCHS = 6


def save(folder: Path, epoch: int, state: dict[str, Any]) -> None:
    """Write a new file for every checkpoint, and a mark when it is complete: not every mounted bucket can rename."""
    import torch

    file = folder / f"epoch-{epoch:04}.pt"
    torch.save(state, file)
    file.with_suffix(".done").touch()


def load(folder: Path) -> dict[str, Any] | None:
    """Return the last complete checkpoint, or None."""
    import torch

    whole = [file for file in folder.glob("epoch-*.pt") if file.with_suffix(".done").exists()]
    return torch.load(max(whole), map_location="cpu") if whole else None


def lose_this_node() -> None:
    """Kill the node's supervisor, and so all its processes, as if the machine were gone."""
    import psutil

    next(process for process in psutil.Process().parents() if "skyward.node.supervisor" in process.cmdline()).kill()
    threading.Event().wait(60)


@sky.compute
@sky.distributed.torch()
def train(folder: Path, *, accident: bool = False) -> list[float]:
    """Train from the last checkpoint in ``folder``; return the weights. ``accident`` kills a node of a fresh run."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]))
    sampler = sky.DistributedSampler(dataset)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    # Rank 0 writes, so rank 0 reads and broadcasts: the other nodes may not see its files yet.
    found = [load(folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    first = 0
    if checkpoint := found[0]:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["epoch"] + 1
    if dist.get_rank() == 0:
        print(f"begins with epoch {first}")

    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)  # the same order for the same epoch and rank, also on a new node
        for batch, wanted in DataLoader(dataset, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch), wanted).backward()
            optimizer.step()
            if accident and first == 0 and epoch == 3 and dist.get_rank() == 2:
                lose_this_node()
        if dist.get_rank() == 0:
            save(folder, epoch, {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return model.module.weight.flatten().tolist()


def train_to_the_end(pool: sky.ComputePool, folder: Path, *, accident: bool = False) -> list[float]:
    """Train, and continue after losses, when the pool has replaced the workers or whole nodes."""
    for _ in range(5):
        try:
            return (train(folder, accident=accident) @ pool)[0]
        except sky.WorkerLostError as lost:
            print(f"interrupted: {lost.reason}")
    raise RuntimeError("the training was interrupted too often")


def main() -> None:
    # In a cloud the folder is a volume: volume=[sky.S3Volume(mount_path=..., bucket=..., read_only=False)].
    with (
        tempfile.TemporaryDirectory() as first,
        tempfile.TemporaryDirectory() as second,
        sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, image=sky.Image(pip=["torch"])) as pool,
    ):
        undisturbed = train_to_the_end(pool, Path(first))
        resumed = train_to_the_end(pool, Path(second), accident=True)

    print(f"undisturbed: {[round(weight, 5) for weight in undisturbed]}")
    print(f"resumed:     {[round(weight, 5) for weight in resumed]}")


if __name__ == "__main__":
    main()
