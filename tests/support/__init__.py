"""Doubles for this project's own tests; the ones for users are in :mod:`skyward.testing`.

Imported as ``support``: pytest puts ``tests`` on the path (``pythonpath`` in pyproject.toml).
"""
