"""The site: Sphinx reads the Markdown files beside this one. `make docs` builds it."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "Skyward"
author = "The Skyward authors"
copyright = "2026, the Skyward authors"
release = version = installed_version("skyward")

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "furo"
html_title = "Skyward"
html_copy_source = False
html_show_sphinx = False
