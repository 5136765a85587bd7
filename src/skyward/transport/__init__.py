"""Transports: commands, files and connections to a machine, over SSH or as subprocesses on this one."""
