"""The confidence interval of a percentile: many samples of one large array, which each node receives once.

usage: python examples/joblib/bootstrap_confidence.py [loky|skyward]
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import numpy as np
from joblib import Parallel, delayed, parallel_config

import skyward as sky
from skyward.integrations import JoblibPool


def resample(seconds: np.ndarray, seed: int) -> float:
    """Return the 99th percentile of a sample of the same size, drawn with replacement."""
    drawn = np.random.default_rng(seed).choice(seconds, size=len(seconds))
    return float(np.percentile(drawn, 99))


def main() -> None:
    seconds = np.random.default_rng(0).lognormal(mean=-2, sigma=0.8, size=200_000)

    drawn = Parallel(n_jobs=-1)(delayed(resample)(seconds, seed) for seed in range(100))

    low, high = np.percentile(drawn, [2.5, 97.5])
    print(f"99 % of {len(seconds):,} requests took less than {np.percentile(seconds, 99):.4f} s")
    print(f"with 95 % confidence between {low:.4f} s and {high:.4f} s")


if __name__ == "__main__":
    [backend] = sys.argv[1:] or ["loky"]
    pool = JoblibPool(provider=sky.Local(), concurrency=2) if backend == "skyward" else nullcontext()
    with pool, parallel_config(backend):
        main()
