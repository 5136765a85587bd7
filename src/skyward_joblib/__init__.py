"""Skyward behind joblib and scikit-learn: their parallel loops run on a fleet.

Importing this package registers the joblib backend ``"skyward"``.
"""

from __future__ import annotations

try:
    from joblib import register_parallel_backend
except ImportError as error:
    raise ImportError(
        "joblib is missing here: pip install 'skyward-fleet[joblib]', or 'skyward-fleet[sklearn]' with scikit-learn"
    ) from error

from skyward_joblib.backend import SkywardBackend
from skyward_joblib.pools import JoblibPool, ScikitLearnPool, joblib_backend, sklearn_backend

__all__ = ["JoblibPool", "ScikitLearnPool", "SkywardBackend", "joblib_backend", "sklearn_backend"]

register_parallel_backend("skyward", SkywardBackend)
