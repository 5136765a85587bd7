"""What a person does on a laptop: ``client_program.py SETTINGS``; prints one line of JSON for each result."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import numpy as np
from click.testing import CliRunner
from joblib import Parallel, delayed

import skyward as sky
from skyward.cli import main as skyward
from skyward.integrations import JoblibPool


@sky.compute
def system() -> tuple[int, str]:
    return sky.instance_info().node, sys.platform


@sky.compute
def total(array: np.ndarray, factor: int) -> int:
    return int(array.sum()) * factor


@sky.compute
def begin() -> None:
    print("begun", flush=True)
    time.sleep(600)


def show(name: str, value: object) -> None:
    print(json.dumps({name: value}), flush=True)


def command(*arguments: str) -> object:
    done = CliRunner(catch_exceptions=False).invoke(skyward, [*arguments, "--json"])
    return json.loads(done.stdout)


def use(pool: sky.ComputePool) -> None:
    show("call", (system() >> pool)[1])
    show("broadcast", list(system() @ pool))
    ones = np.ones(50_000_000, dtype="u1")
    show("gather", list(sky.gather(*[total(ones, factor) for factor in range(4)]) >> pool))
    show("joblib", Parallel(n_jobs=2)(delayed(pow)(n, 2) for n in range(5)))
    show("ls", sorted(machine["provider"] for machine in command("ls")["machines"]))
    show("top", [len(seen["nodes"]) for seen in command("top", "--once")["pools"]])


def use_dask(pool: sky.ComputePool) -> None:
    import dask.array as da

    with pool.dask_client() as client:
        show("graph", int(client.compute(da.ones((1000, 1000), chunks=250).sum()).result()))
        show("task", client.submit(lambda: sys.platform).result())


def cancel(pool: sky.ComputePool) -> None:
    pool.on(sky.LogLine, lambda event: os.kill(os.getpid(), signal.SIGINT) if event.line == "begun" else None)
    try:
        begin() >> pool
    except KeyboardInterrupt:
        show("interrupted", (system() >> pool)[1])


def main(provider: sky.SSH | sky.Local, nodes: int) -> None:
    with JoblibPool(provider=provider, nodes=nodes, concurrency=1, display="quiet") as pool:
        use(pool)
        use_dask(pool)
        cancel(pool)
    show("left", command("ls")["machines"])


if __name__ == "__main__":
    show("platform", sys.platform)
    settings = json.loads(sys.argv[1])
    main(sky.SSH(**settings), len(settings["hosts"])) if settings else main(sky.Local(), 2)
