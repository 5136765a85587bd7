"""Public fakes and contract suites for every seam."""
