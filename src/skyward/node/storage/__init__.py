"""Blobs and volumes of a node."""
