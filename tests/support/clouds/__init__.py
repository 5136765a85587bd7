"""Clouds of the tests: one stateful REST service per vendor, on one kit."""
