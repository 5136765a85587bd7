"""Dask's arrays and data frames on a fleet: the code is Dask's own, one line selects the cluster.

usage: python examples/dask/arrays_and_frames.py [local|skyward]
"""

from __future__ import annotations

import sys

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster

import skyward as sky
from skyward_dask import SkywardCluster


def main() -> None:
    rides = da.random.default_rng(0).lognormal(mean=2, sigma=0.5, size=(400_000,), chunks=50_000)
    low, middle, high = da.percentile(rides, [5, 50, 95]).compute()
    print(f"half of {len(rides):,} rides took {middle:.1f} minutes or less, nine in ten {low:.1f} to {high:.1f}")

    matrix = da.ones((3000, 3000), chunks=(750, 750))
    print(f"the mean of a matrix and its transpose, tile by tile: {float((matrix + matrix.T).mean().compute()):.1f}")

    hours = np.arange(100_000) % 24
    table = pd.DataFrame({"hour": hours, "minutes": 10 + 5 * np.isin(hours, [8, 17]) + hours / 24})
    by_hour = dd.from_pandas(table, npartitions=8).groupby("hour")["minutes"].mean().compute().sort_index()
    print(f"the slowest hour is {by_hour.idxmax()}:00, with {by_hour.max():.2f} minutes on average")


if __name__ == "__main__":
    [where] = sys.argv[1:] or ["skyward"]
    if where == "skyward":
        cluster = SkywardCluster(provider=sky.Local(), nodes=2)
    else:
        cluster = LocalCluster(n_workers=2, dashboard_address=":0")
    with cluster, Client(cluster):
        main()
