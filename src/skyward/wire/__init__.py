"""Shared parts of both ends of a connection: messages, sessions, frames, limits, and the parts of Dask in use."""
