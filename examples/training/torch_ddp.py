"""Data-parallel training with PyTorch: a copy of the model and a part of the data on every worker.

usage: python examples/training/torch_ddp.py
"""

from __future__ import annotations

import skyward as sky


@sky.compute
@sky.distributed.torch()
def train(epochs: int) -> tuple[int, float, float]:
    """Learn which points lie in a circle; return this worker's rank, the accuracy, and the sum of its weights."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    # A worker sees only its own GPU, which therefore has index 0.
    device = "cuda:0" if torch.cuda.is_available() else "cpu"

    points = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0))
    inside = (points.norm(dim=1) < 1.2).float()
    dataset = TensorDataset(points, inside)
    sampler = sky.DistributedSampler(dataset)  # by default for the workers of this call
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0)).to(device)
    model = DistributedDataParallel(model)  # the process group already exists
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loss_of = nn.BCEWithLogitsLoss()

    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # a different order in every epoch
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(batch.to(device)), labels.to(device))
            loss.backward()  # averages the gradients over all workers
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")

    with torch.no_grad():
        right = ((model(points.to(device)) > 0) == inside.to(device).bool()).float().mean()
        weights = sum(parameter.sum() for parameter in model.parameters())
    return dist.get_rank(), right.item(), float(weights)


def main() -> None:
    # On GPUs: provider=sky.AWS(), accelerator=sky.accelerators.L4(count=4), concurrency=4.
    image = sky.Image(pip=["torch"])
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, image=image) as pool:
        outcomes = train(epochs=5) @ pool

    for rank, accuracy, weights in outcomes:
        print(f"rank {rank}: accuracy {accuracy:.3f}, weights add up to {weights:.6f}")


if __name__ == "__main__":
    main()
