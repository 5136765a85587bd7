"""Time limits that the client and the programs on a node share: each end relies on the value of the other."""

from __future__ import annotations

from typing import Final

HANDSHAKE_S: Final = 10.0
"""Seconds for a new connection to authenticate and to exchange greetings, at either end."""

PING_S: Final = 5.0
"""Seconds between two pings of the client on a control connection."""
SILENT_PINGS: Final = 3
"""Number of pings without an answer after which the client gives the control connection up."""
SILENCE_S: Final = PING_S * SILENT_PINGS
"""Seconds of silence after which a node takes its client for away, not for gone, when the connection closes."""

# Eight GPUs are reset and partitioned one after the other.
MIG_START_S: Final = 240.0
"""Additional seconds that a node with MIG partitions may take to start."""
MIG_UNDO_S: Final = 120.0
"""Additional seconds that it may take to end."""

RELEASE_S: Final = 900.0
"""Seconds that an ending node may take to write the last changes of its volumes back."""
