"""GPUs of a node: driver, partitions, health."""
