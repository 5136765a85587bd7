"""Trace context of the client around a call, so that spans that the call makes are children of the call's span."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

__all__ = ["trace_context"]


@contextmanager
def trace_context(carrier: Mapping[str, str]) -> Generator[None]:
    """Attach the context in ``carrier``; do nothing without OpenTelemetry on this node, where no span can be made."""
    try:
        from opentelemetry import context, propagate
    except ImportError:
        yield
        return
    token = context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)
