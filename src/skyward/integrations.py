"""Integrations with other libraries: joblib and scikit-learn.

The names are those of the package ``skyward_joblib``, which is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skyward.request.front_ends import FRONT_ENDS

if TYPE_CHECKING:
    from skyward_joblib import JoblibPool, ScikitLearnPool, joblib_backend, sklearn_backend

__all__ = ["JoblibPool", "ScikitLearnPool", "joblib_backend", "sklearn_backend"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(FRONT_ENDS["joblib"].package), name)


def __dir__() -> list[str]:
    return __all__
