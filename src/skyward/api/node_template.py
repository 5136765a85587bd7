"""Template of a pool's nodes on this machine, started before the modules of an open pool are imported.

Its own imports take longer than all else of an opening, and another core.
"""

from __future__ import annotations

from skyward.base.descriptors import raised_descriptor_limit
from skyward.fleet import template_process
from skyward.providers.base import Provider
from skyward.request.request import PoolRequest


def start_template(provider: Provider, request: PoolRequest) -> None:
    """Start the process that nodes of the pool are forked from, if they are on this machine. Idempotent."""
    if provider.this_machine:
        with raised_descriptor_limit():  # as in an open pool: nodes have the limits of their template
            template_process.start_template(request)
