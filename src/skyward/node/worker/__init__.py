"""Worker processes and the nannies that replace them."""
