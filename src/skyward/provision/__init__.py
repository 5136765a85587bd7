"""From a request to running nodes, and back to none."""
