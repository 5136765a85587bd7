"""Dask's settings ``skyward.*``; ``skyward.yaml``, next to this file, lists and explains them."""

from __future__ import annotations

from functools import cache
from importlib.resources import as_file, files
from typing import Any, cast

import dask.config
from dask.utils import parse_timedelta

from skyward.errors import ConfigurationError


@cache
def _defaults() -> dict[str, Any]:
    with as_file(files("skyward_dask").joinpath("skyward.yaml")) as path:
        (defaults,) = cast("Any", dask.config).collect_yaml([str(path)])
    return defaults


@cache
def load_defaults() -> None:
    """Register the defaults with Dask; values of the user take precedence. Idempotent."""
    dask.config.update_defaults(_defaults())


def setting(name: str) -> Any:
    """Return the value of ``skyward.<name>``, or its default if Dask's configuration was cleared or replaced."""
    load_defaults()
    key = f"skyward.{name}"
    return dask.config.get(key, default=dask.config.get(key, config=_defaults()))


def seconds(parameter: str, value: object) -> float:
    """Return a duration in seconds, given in Dask's forms: ``"30s"``, a number of seconds or a timedelta.

    Raises:
        ConfigurationError: the value is no duration, or not above zero.
    """
    try:
        found = cast("float", parse_timedelta(cast("Any", value), "s"))
    except (ValueError, TypeError, KeyError, AttributeError):
        found = 0.0
    if isinstance(value, bool) or not found or found <= 0:
        raise ConfigurationError(f'{parameter} must be a duration above zero such as "30s", got {value!r}')
    return float(found)
