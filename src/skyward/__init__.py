"""Ephemeral accelerator compute: ordinary Python on machines that exist only while they work.

::

    import skyward as sky

    @sky.compute
    def square(x: int) -> int:
        return x * x

    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        four = square(2) >> pool

``__init__.pyi`` lists the public names. Each is loaded on first use, so that importing this package is cheap.
"""

from __future__ import annotations

from skyward._lazy_names import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
