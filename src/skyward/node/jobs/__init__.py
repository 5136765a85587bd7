"""Jobs of a node: calls that lie in its folder until they have run, and whose outcomes stay there."""
