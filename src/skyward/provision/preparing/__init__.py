"""Preparation of one machine: its Python environment, files, volumes and supervisor."""
