"""Program of a user, run in every layout of packages: one pool, each front-end. Prints what it got as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import numpy as np
from joblib import Parallel, delayed
from own.models import Model

import skyward as sky
from skyward.integrations import joblib_backend


class Settings:
    rate = 2


def saved(value: object) -> bool:
    import pickle

    return type(pickle.loads(pickle.dumps(value))) is type(value)


def work(number: int) -> list[Any]:
    from own import lazily

    total = float(np.ones(number).sum()) * Settings.rate
    return [total, click.__name__, lazily.times(number), saved(Model(number))]


CELL = """
def cell(number):
    from own import lazily
    return [float(np.ones(number).sum()) * Settings.rate, click.__name__, lazily.times(number), saved(Settings())]
"""


def main() -> None:
    results: dict[str, Any] = {}
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        results["operators"] = sky.compute(work)(3) >> pool
        with joblib_backend(pool):
            (results["joblib"],) = Parallel()(delayed(work)(number) for number in [3])
        with pool.dask_client() as client:
            results["dask"] = client.submit(work, 3).result()
        exec(compile(CELL, "<cell 1>", "exec"), globals())
        results["notebook"] = sky.compute(globals()["cell"])(3) >> pool
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
