"""XGBoost on a fleet: every worker trains on the partitions that it holds, and all of them build the same trees.

usage: python examples/dask/xgboost_training.py

Needs `xgboost`, or `xgboost-cpu` without CUDA's libraries. On a cloud: replace `sky.Local()` with `sky.AWS()`, whose
nodes reach each other; this needs that.
"""

from __future__ import annotations

import dask.array as da
import numpy as np
from distributed import Client
from sklearn.datasets import make_friedman1
from xgboost import dask as dxgb

import skyward as sky
from skyward_dask import SkywardCluster

ROUNDS = 40


def main() -> None:
    """Train on three quarters of the rows, and print the error on the others, of the first and of the last round."""
    features, target = make_friedman1(n_samples=8000, random_state=0)
    rows = da.from_array(features, chunks=(1000, -1)), da.from_array(target, chunks=1000)

    image = sky.Image(pip=["xgboost-cpu", "scikit-learn"])
    with SkywardCluster(provider=sky.Local(), nodes=2, image=image) as cluster, Client(cluster) as client:
        train = dxgb.DaskDMatrix(client, *[part[:6000] for part in rows])
        unseen = dxgb.DaskDMatrix(client, *[part[6000:] for part in rows])
        trained = dxgb.train(
            client, {"max_depth": 4, "eta": 0.3}, train, num_boost_round=ROUNDS, evals=[(unseen, "unseen")]
        )
        errors = trained["history"]["unseen"]["rmse"]
        predicted = dxgb.predict(client, trained["booster"], rows[0][6000:]).compute()

    print(f"error after 1 round: {errors[0]:.2f}, after {len(errors)}: {errors[-1]:.2f}")
    print(f"correlation with the true values: {np.corrcoef(predicted, target[6000:])[0, 1]:.3f}")


if __name__ == "__main__":
    main()
