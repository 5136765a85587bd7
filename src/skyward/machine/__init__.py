"""Access to machines: commands, files and connections."""
