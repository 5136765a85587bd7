"""Functions, modules and errors on their way: pickles, sources of modules that travel by value, and tracebacks."""
