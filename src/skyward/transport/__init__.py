"""How commands, files and connections reach a machine."""
