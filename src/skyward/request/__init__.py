"""Values: what a pool is asked for. Pure: nothing here does I/O, but reading the package's own data."""
