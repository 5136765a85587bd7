"""What travels to workers and back: pickles, sources of modules, large buffers."""
