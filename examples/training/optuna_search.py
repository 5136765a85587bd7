"""A search for hyper-parameters with Optuna: it proposes as many trials as there are workers, and learns from all.

usage: python examples/training/optuna_search.py
"""

from __future__ import annotations

import optuna

import skyward as sky

ROUNDS = 5


@sky.compute
def fit(rate: float, width: int) -> float:
    """Train a small network with these settings; return its error on unseen points."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    x = torch.rand(512, 1) * 6 - 3
    y = torch.sin(2 * x)
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[:400]), y[:400]).backward()
        optimizer.step()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x[400:]), y[400:]).item()


def search(pool: sky.ComputePool, study: optuna.Study, at_once: int) -> None:
    """Request trials, run them in parallel, and report the results. The study stays here; the workers only train."""
    trials = [study.ask() for _ in range(at_once)]
    calls = [
        fit(trial.suggest_float("rate", 1e-4, 1.0, log=True), trial.suggest_int("width", 2, 64)) for trial in trials
    ]
    # A failed trial, for example out of memory, does not end the search.
    for trial, error in zip(trials, sky.gather(*calls, return_exceptions=True) >> pool, strict=True):
        if isinstance(error, BaseException):
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, error)


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # constant_liar: trials of a round without a result count as bad, so that the next ones differ from them.
    sampler = optuna.samplers.TPESampler(seed=0, constant_liar=True, n_startup_trials=8)
    study = optuna.create_study(direction="minimize", sampler=sampler)

    with sky.ComputePool(provider=sky.Local(), nodes=2, concurrency=2, image=sky.Image(pip=["torch"])) as pool:
        for number in range(ROUNDS):
            search(pool, study, at_once=4)
            print(f"round {number}: best error {study.best_value:.5f}")

    print(f"{len(study.trials)} trials, the best with {study.best_params}")


if __name__ == "__main__":
    main()
