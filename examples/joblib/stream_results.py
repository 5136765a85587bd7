"""Simulate until the answer is precise enough: a loop over tasks that never end, which its own results bring to an end.

The price of an Asian option, with nothing known but how its asset moves.

usage: python stream_results.py [loky|skyward]
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from itertools import count, takewhile
from statistics import fmean, stdev

import numpy as np
from joblib import Parallel, delayed, parallel_config

import skyward as sky
from skyward.integrations import JoblibPool


def simulate_price(seed: int) -> float:
    """The mean payoff of 20,000 random years of 50 weeks."""
    weekly = np.random.default_rng(seed).normal(0.0006, 0.028, size=(20_000, 50))
    prices = 100 * np.exp(weekly.cumsum(axis=1))
    return float(np.maximum(prices.mean(axis=1) - 100, 0).mean())


def error(prices: list[float]) -> float:
    """The standard error of their mean; infinite for a few."""
    return stdev(prices) / len(prices) ** 0.5 if len(prices) >= 5 else float("inf")


def main() -> None:
    prices: list[float] = []
    seeds = takewhile(lambda _: error(prices) > 0.01, count())
    for price in Parallel(n_jobs=-1, return_as="generator")(delayed(simulate_price)(seed) for seed in seeds):
        if error(prices) > 0.01:  # else it was on its way already
            prices.append(price)
            print(f"{len(prices):3} simulations: {fmean(prices):.3f} ± {error(prices):.3f}", flush=True)


if __name__ == "__main__":
    [backend] = sys.argv[1:] or ["loky"]
    pool = JoblibPool(provider=sky.Local(), concurrency=2) if backend == "skyward" else nullcontext()
    with pool, parallel_config(backend):
        main()
