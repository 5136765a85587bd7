"""Threads, the event loop, waiting and the end of the process: shared by everything else."""
