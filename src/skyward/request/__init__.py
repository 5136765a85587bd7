"""Values: the parameters of a pool. Pure: nothing here does I/O, but reading the package's own data."""
