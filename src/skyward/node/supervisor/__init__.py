"""Program that owns a node: starts, watches and ends everything on it."""
