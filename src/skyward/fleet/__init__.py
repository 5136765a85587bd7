"""The pool's fleet: its nodes, from launch to termination."""
