"""Constants of a node's programs, apart from their modules: the program that starts a supervisor imports little."""

from __future__ import annotations

from typing import Final

SUPERVISOR_LOG: Final = "supervisor.log"
"""File in a node's folder, from the start of its supervisor: messages of all its processes."""

HASH_SEED: Final = {"PYTHONHASHSEED": "6640"}
"""Variable with which the workers of all nodes hash alike; any number does."""
