"""Machines of AWS EC2."""
