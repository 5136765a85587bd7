"""Views of an open pool besides its display: for other processes, in notebooks, and in the exceptions of its calls."""
