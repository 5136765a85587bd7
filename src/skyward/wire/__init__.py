"""Shared parts of both ends of a connection: messages, sessions, frames, pickling, limits."""
