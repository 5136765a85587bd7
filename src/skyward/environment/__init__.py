"""From an image to the Python on a machine."""
