"""One training on the processor and on the GPU of a machine, with the time of each.

usage: python examples/training/gpu_against_cpu.py

Without a GPU the processor alone is measured. On a cloud: `provider=sky.AWS(), accelerator="L4"`.
"""

from __future__ import annotations

import skyward as sky


@sky.compute
def measure(device: str, steps: int = 20) -> tuple[str, float, float]:
    """Train a small network on ``device``; return the device's name, the seconds for a step, and the last loss."""
    import time

    import torch
    from torch import nn

    torch.manual_seed(0)
    rows = torch.randn(4096, 256)
    wanted = rows[:, :1].tanh()
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1)).to(device)
    rows, wanted = rows.to(device), wanted.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    began = time.perf_counter()
    for step in range(steps + 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(rows), wanted)
        loss.backward()
        optimizer.step()
        last = loss.item()  # waits for the GPU
        if step == 0:
            began = time.perf_counter()  # the first step loads libraries
    return device, (time.perf_counter() - began) / steps, last


@sky.compute
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    """Measure each device that the node has."""
    with sky.ComputePool(provider=sky.Local(), image=sky.Image(pip=["torch"])) as pool:
        devices = ["cpu", "cuda"] if has_gpu() >> pool else ["cpu"]
        measured = [measure(device) >> pool for device in devices]

    for device, seconds, loss in measured:
        print(f"{device}: {seconds * 1000:.1f} ms for a step, loss {loss:.3f}")
    if len(measured) == 1:
        print("no GPU on this node: the processor alone was measured")
    else:
        print(f"the GPU is {measured[0][1] / measured[1][1]:.1f} times as fast")


if __name__ == "__main__":
    main()
