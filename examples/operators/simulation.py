"""An embarrassingly parallel simulation with a plot: the chance of an insurer's ruin, by its starting capital.

usage: python examples/operators/simulation.py [PICTURE]

Needs numpy, and matplotlib for the picture. On a cloud: replace `sky.Local()` with `sky.AWS()`, for example.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import skyward as sky

CAPITALS = (0, 5, 10, 20, 40)
YEARS, RUNS, BLOCKS = 50, 2000, 8


@sky.compute
def ruined(capital: int, seed: int) -> float:
    """Return the share of runs in which yearly claims exceed the capital and the premiums."""
    claims = np.random.default_rng([capital, seed]).exponential(10, size=(RUNS, YEARS))
    reserves = capital + np.cumsum(10.5 - claims, axis=1)
    return float(np.mean(reserves.min(axis=1) < 0))


def plot(chances: dict[int, float], picture: Path) -> None:
    """Draw the chances into an SVG file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "skyward", "svg.fonttype": "none"})
    axes = (figure := Figure(figsize=(6, 3), layout="constrained")).subplots()
    axes.plot(list(chances), list(chances.values()), marker="o")
    axes.set(xlabel="starting capital (an average year's claims are 10)", ylabel="chance of ruin", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.savefig(picture, format="svg", metadata={"Date": None})


def main(picture: str = "") -> None:
    """Run all blocks of all capitals in parallel, and average them."""
    calls = [ruined(capital, seed) for capital in CAPITALS for seed in range(BLOCKS)]
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2) as pool:
        shares = sky.gather(*calls) >> pool
    chances = dict(zip(CAPITALS, np.reshape(shares, (-1, BLOCKS)).mean(axis=1).tolist(), strict=True))
    for capital, chance in chances.items():
        print(f"capital {capital:2}: ruined in {chance:.1%} of {RUNS * BLOCKS:,} runs")
    if picture:
        plot(chances, Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
