"""Providers of machines, and stores of volumes."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["STORES"]

STORES: Mapping[str, str] = {"S3Volume": "skyward.providers.aws.s3"}
"""Module that implements each kind of volume, by the name of its class."""
