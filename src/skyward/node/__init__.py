"""Programs that run on a node."""
