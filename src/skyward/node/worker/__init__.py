"""Worker processes: what runs calls."""
