"""Providers of machines, and stores of volumes; the names that a provider in a package of its own may import.

Every public name here keeps its meaning between releases. The modules below this package are Skyward's own.
``__init__.pyi`` lists the names. Each is loaded on first use: nodes import this package for volumes and need no name.
"""

from __future__ import annotations

from skyward._lazy_names import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
