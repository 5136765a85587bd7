"""The pool's fleet: its state machine, its driver and its upkeep."""
