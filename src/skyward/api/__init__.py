"""What users hold: pools, lazy calls, operators, executors."""
