"""User-facing objects: pools, lazy calls, executors, the display and the command line."""
