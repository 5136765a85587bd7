"""``python -m skyward``: the ``skyward`` command."""

from __future__ import annotations

from skyward.cli import main

if __name__ == "__main__":
    main()
