"""A callback composed of two: one draws the progress of a training, the other counts events and adds one of its own.

usage: python examples/operators/events.py

On a cloud: replace `sky.Local()` with `sky.AWS()`, for example; `CostUpdate` events then state the cost.
"""

from __future__ import annotations

from collections import Counter

import skyward as sky


@sky.compute
def train(epochs: int) -> float:
    """Halve an error once an epoch; send an event and print a line each time."""
    error = 1.0
    for epoch in range(1, epochs + 1):
        error /= 2
        sky.emit(sky.Progress("epochs", epoch, epochs))  # travels to the client
        print(f"error {error}")
    return error


kinds: Counter[str] = Counter()


def draw(event: sky.SkywardEvent) -> None:
    match event:
        case sky.Progress(label="epochs", done=done, total=total):
            print(f"[{'#' * done}{'.' * (total - done)}] epoch {done} of {total}")
        case sky.Notice(message=message):
            print(f"notice: {message}")


def count_kinds(event: sky.SkywardEvent) -> sky.SkywardEvent | None:
    """Count events; a returned event is emitted as well."""
    kinds[type(event).__name__] += 1
    return sky.Notice("every worker is up") if isinstance(event, sky.PoolStarted) else None


def main() -> None:
    """Open a pool with both callbacks, and add one for a single kind of event."""
    lines: list[str] = []
    with sky.ComputePool(provider=sky.Local(), on_event=sky.compose(draw, count_kinds)) as pool:
        pool.on(sky.LogLine, lambda event: lines.append(event.line))
        train(3) >> pool

    print(f"output: {lines}")
    print({kind: kinds[kind] for kind in ("PoolStarted", "LogLine", "Notice", "PoolStopped")})


if __name__ == "__main__":
    main()
