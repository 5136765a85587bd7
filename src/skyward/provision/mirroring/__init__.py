"""This environment's distributions on nodes: chosen here, checked against the index, local ones sent as wheels."""
