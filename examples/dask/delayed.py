"""A graph of ordinary functions, on a fleet that grows while it runs.

usage: python examples/dask/delayed.py
"""

from __future__ import annotations

from collections import Counter

from dask import delayed
from distributed import Client

import skyward as sky
from skyward_dask import SkywardCluster

CHAPTERS = [f"it was chapter {number} of a book about a fleet of ships and the sea" for number in range(32)]


@delayed
def count_words(text: str) -> Counter[str]:
    return Counter(text.split())


@delayed
def add(left: Counter[str], right: Counter[str]) -> Counter[str]:
    return left + right


def main(cluster: SkywardCluster) -> None:
    counts = [count_words(text) for text in CHAPTERS]
    while len(counts) > 1:
        counts = [add(left, right) for left, right in zip(counts[::2], counts[1::2], strict=True)]

    cluster.scale(2)  # the graph starts on the first node
    words = counts[0].compute()

    print(", ".join(f"{word} {times}" for word, times in words.most_common(2)))
    cluster.wait_for_workers(2)
    print(" and ".join(sorted(cluster.observed)), "were there in the end")


if __name__ == "__main__":
    with SkywardCluster(provider=sky.Local(), nodes=1) as cluster, Client(cluster):
        main(cluster)
