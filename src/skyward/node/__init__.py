"""The programs that run on a node."""
