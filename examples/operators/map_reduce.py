"""Word count by map and reduce: every worker counts its part, the counts are merged by first letter, the head reports.

usage: python examples/operators/map_reduce.py

On a cloud: replace `sky.Local()` with `sky.AWS()`, for example.
"""

from __future__ import annotations

from collections import Counter

import skyward as sky

LINES = [f"line {number} of a text about {number % 3} ships and {number % 5} stars" for number in range(1000)]
LETTERS = ("abcdefghi", "jklmnopqr", "stuvwxyz")


@sky.compute
def count_words(lines: list[str]) -> tuple[str, Counter[str]]:
    """Map: count the words of this worker's part, and return the worker's role with them."""
    info = sky.instance_info()
    mine = sky.shard(lines)
    role = "head" if info.is_head else "mapper"
    return f"{role} on node {info.node}: {len(mine)} lines", Counter(" ".join(mine).split())


@sky.compute
def merge(counts: list[Counter[str]], letters: str) -> Counter[str]:
    """Reduce: add up the counts of the words that begin with one of the letters."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update({word: times for word, times in each.items() if word[0] in letters})
    return total


def main() -> None:
    """Map on every worker, reduce on as many workers as there are groups of letters."""
    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2) as pool:
        roles, counts = zip(*(count_words(LINES) @ pool), strict=True)
        groups = sky.gather(*[merge(list(counts), letters) for letters in LETTERS]) >> pool

    print(*roles, sep="\n")
    for letters, group in zip(LETTERS, groups, strict=True):
        print(f"{letters[0]}-{letters[-1]}: {', '.join(f'{word} {times}' for word, times in sorted(group.items()))}")


if __name__ == "__main__":
    main()
