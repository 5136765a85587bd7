"""Simulate until the result is precise enough: a loop over an infinite stream of tasks, which its own results end.

It computes the price of an Asian option from a model of its asset.

usage: python examples/joblib/stream_results.py [loky|skyward]
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
    """Return the mean payoff of 20,000 random years of 50 weeks."""
    weekly = np.random.default_rng(seed).normal(0.0006, 0.028, size=(20_000, 50))
    prices = 100 * np.exp(weekly.cumsum(axis=1))
    return float(np.maximum(prices.mean(axis=1) - 100, 0).mean())


def error(prices: list[float]) -> float:
    """Return the standard error of the mean; infinite for a few prices."""
    return stdev(prices) / len(prices) ** 0.5 if len(prices) >= 5 else float("inf")


def main() -> None:
    prices: list[float] = []
    seeds = takewhile(lambda _: error(prices) > 0.01, count())
    for price in Parallel(n_jobs=-1, return_as="generator")(delayed(simulate_price)(seed) for seed in seeds):
        if error(prices) > 0.01:  # tasks already submitted still return results
            prices.append(price)
            print(f"{len(prices):3} simulations: {fmean(prices):.3f} ± {error(prices):.3f}", flush=True)


if __name__ == "__main__":
    [backend] = sys.argv[1:] or ["loky"]
    pool = JoblibPool(provider=sky.Local(), concurrency=2) if backend == "skyward" else nullcontext()
    with pool, parallel_config(backend):
        main()
