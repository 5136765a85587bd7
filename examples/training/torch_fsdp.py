"""Fully sharded training with PyTorch: each worker holds a part of the model, for models too large for one GPU.

usage: python examples/training/torch_fsdp.py
"""

from __future__ import annotations

from typing import Any

import skyward as sky


@sky.compute
@sky.distributed.torch()
def train(steps: int) -> dict[str, Any]:
    """Learn to add ten numbers; return the size of this worker's part, and on rank 0 the whole model."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)  # each layer is gathered only during its use
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # its state is divided too

    chance = torch.Generator().manual_seed(dist.get_rank())  # different numbers on every worker
    for step in range(steps):
        numbers = torch.rand(64, 10, generator=chance).to(device)
        loss = nn.functional.mse_loss(model(numbers), numbers.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    here = sum(parameter.to_local().numel() for parameter in model.parameters())
    # All workers must take part in gathering the model; the first one receives it.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {"rank": dist.get_rank(), "here": here, "model": get_model_state_dict(model, options=options)}


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), concurrency=2, image=sky.Image(pip=["torch", "numpy"])) as pool:
        outcomes = train(steps=100) @ pool

    model = outcomes[0]["model"]
    print(f"parameters: {sum(weights.numel() for weights in model.values())}")
    for outcome in outcomes:
        print(f"rank {outcome['rank']} had {outcome['here']} of them")


if __name__ == "__main__":
    main()
