"""Pictures of docs/tutorials/hyper-parameter-search.md, from a recorded run of its searches.

``python docs/pictures/search.py`` runs the searches on a pool of this machine, about a minute long, and writes
``search.json``. The pictures are drawn from that file when the site is built.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_suffix(".json")
TRIALS, AT_FIRST, ANYWHERE = 60, 8, 0.25
C_RANGE, GAMMA_RANGE = (-2.0, 4.0), (-6.0, 0.0)  # powers of ten
WIDTH, PLOT, LEFT, TOP = 420, 300, 62, 44
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
COLOURS = ("#e2e8f0", "#93c5fd", "#2563eb", "#1e3a8a")
LIMITS = (0.5, 0.9, 0.97)
"""Scores from which the next colour counts."""


@functools.cache
def digits() -> tuple[Any, Any]:
    """Load the data, once on each worker."""
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)


def score(c: float, gamma: float) -> float:
    """Return the mean accuracy of three folds for powers of ten of C and gamma."""
    from sklearn.model_selection import cross_val_score
    from sklearn.svm import SVC

    return float(cross_val_score(SVC(C=10**c, gamma=10**gamma), *digits(), cv=3).mean())


class Sampler:
    """Points near the best ones so far, or anywhere."""

    def __init__(self, seed: int, *, learns: bool) -> None:
        self.random = random.Random(seed)
        self.learns = learns
        self.seen: list[tuple[float, tuple[float, float]]] = []

    def ask(self) -> tuple[float, float]:
        """Return the next point."""
        if not self.learns or len(self.seen) < AT_FIRST or self.random.random() < ANYWHERE:
            return self.random.uniform(*C_RANGE), self.random.uniform(*GAMMA_RANGE)
        _, (c, gamma) = self.random.choice(sorted(self.seen, reverse=True)[:4])
        return self.random.gauss(c, 0.4), self.random.gauss(gamma, 0.4)

    def report(self, point: tuple[float, float], result: float) -> None:
        """Take over the score of a point."""
        self.seen.append((result, point))


def search(pool: Any, sampler: Sampler) -> None:
    """Keep every worker busy until all trials are done."""
    running: dict[Future[float], tuple[float, float]] = {}
    for _ in range(TRIALS):
        if len(running) == pool.capacity:
            _collect(running, sampler)
        point = sampler.ask()
        running[pool.submit(score, *point)] = point
    while running:
        _collect(running, sampler)


def _collect(running: dict[Future[float], tuple[float, float]], sampler: Sampler) -> None:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        sampler.report(running.pop(future), future.result())


def record() -> None:
    """Run both searches, and write their trials in the order in which they finished."""
    import skyward as sky

    samplers = {"random": Sampler(1, learns=False), "learning": Sampler(1, learns=True)}
    with sky.ComputePool(provider=sky.Local(), concurrency=2, image=sky.Image(), timeout=1800) as pool:
        for sampler in samplers.values():
            search(pool, sampler)
    found = {
        name: [[round(c, 3), round(gamma, 3), round(result, 4)] for result, (c, gamma) in sampler.seen]
        for name, sampler in samplers.items()
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(trials)}" for name, trials in found.items())
    DATA.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def trials(name: str) -> Sequence[Sequence[float]]:
    """Return the recorded trials of the search of a picture: powers of ten of C and gamma, and the score."""
    recorded = json.loads(DATA.read_text(encoding="utf-8"))
    return recorded[name.removeprefix("search-").removesuffix(".svg")]


def count_good(found: Sequence[Sequence[float]]) -> int:
    """Return the number of trials of the best colour."""
    return sum(trial[2] >= LIMITS[-1] for trial in found)


def draw() -> dict[str, str]:
    """Return the pictures by their file names."""
    titles = {"random": "60 candidates at random", "learning": "60 candidates near the best so far"}
    names = {f"search-{which}.svg": title for which, title in titles.items()}
    return {name: _scores(title, trials(name)) for name, title in names.items()}


def _scores(title: str, found: Sequence[Sequence[float]]) -> str:
    drawn = _axes(
        title,
        x=[(_share(power, C_RANGE), f"10{_raised(power)}") for power in range(-2, 5, 2)],
        y=[(_share(power, GAMMA_RANGE), f"10{_raised(power)}") for power in range(-6, 1, 2)],
        titles=("C", "gamma"),
    )
    best = max(found, key=lambda trial: trial[2])
    for c, gamma, result in sorted(found, key=lambda trial: trial[2]):
        x, y = _place(_share(c, C_RANGE), _share(gamma, GAMMA_RANGE))
        colour = COLOURS[sum(result >= limit for limit in LIMITS)]
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}" stroke="#475569" stroke-width=".6"/>')
        if (c, gamma, result) == tuple(best):
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="10" fill="none" stroke="#dc2626" stroke-width="2"/>')
    names = ("below 0.5", "from 0.5", "from 0.9", f"from 0.97: {count_good(found)}")
    drawn += _legend([*zip(COLOURS, names, strict=True), ("#dc2626", f"best: {best[2]:.3f}")])
    return _picture(drawn)


def _axes(
    title: str, *, x: Sequence[tuple[float, str]], y: Sequence[tuple[float, str]], titles: tuple[str, str]
) -> list[str]:
    drawn = [_text(LEFT, 26, title, weight="600", size=15)]
    drawn.append(f'<rect x="{LEFT}" y="{TOP}" width="{PLOT}" height="{PLOT}" fill="#f8fafc" stroke="#cbd5e1"/>')
    for share, label in x:
        drawn.append(_text(_place(share, 0)[0], TOP + PLOT + 20, label, anchor="middle"))
    for share, label in y:
        height = _place(0, share)[1]
        drawn.append(f'<path d="M{LEFT} {height:.1f}h{PLOT}" stroke="#e2e8f0"/>')
        drawn.append(_text(LEFT - 8, height + 4, label, anchor="end"))
    drawn.append(_text(LEFT + PLOT / 2, TOP + PLOT + 40, titles[0], anchor="middle"))
    drawn.append(_text(14, TOP + PLOT / 2, titles[1], anchor="middle", turned=True))
    return drawn


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    drawn: list[str] = []
    for index, (colour, label) in enumerate(entries):
        x, y = LEFT - 6 + index % 3 * 112, TOP + PLOT + 66 + 22 * (index // 3)
        drawn += [f'<circle cx="{x}" cy="{y - 4}" r="6" fill="{colour}"/>', _text(x + 12, y, label, size=12)]
    return drawn


def _share(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _place(right: float, up: float) -> tuple[float, float]:
    return LEFT + right * PLOT, TOP + PLOT - up * PLOT


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400", size: int = 13, turned: bool = False
) -> str:
    turn = f' transform="rotate(-90 {x} {y})"' if turned else ""
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}{turn}>{text}</text>'


def _raised(power: int) -> str:
    return f'<tspan dy="-5" font-size="10">{power}</tspan>'


def _picture(drawn: Sequence[str]) -> str:
    height = TOP + PLOT + 104
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="{FONT}" fill="#0f172a">\n<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    record()
    images = Path(__file__).parents[1] / "images"
    for file, picture in draw().items():
        (images / file).write_text(picture, encoding="utf-8")
