"""The site: Sphinx reads the Markdown files beside this one. `make docs` builds it."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

from skyward.environment.skyward_wheel import DISTRIBUTION

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from pictures import draw_all

project = "Skyward"
author = "The Skyward authors"
copyright = "2026, the Skyward authors"
release = version = installed_version(DISTRIBUTION)

extensions = [
    "extensions.public_names",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_click",
]
exclude_patterns = ["_build", "extensions", "pictures"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nitpicky = True
nitpick_ignore_regex = [
    # Of other projects, whose pages a build without a network cannot look up.
    (r"py:.*", r"(boto3|botocore|click|dask|distributed|flask|joblib|psutil|pytest|torch|tornado|werkzeug)\..*"),
    (r"py:class", r"Client|Security|BaseWSGIServer"),  # imported for type checkers only
    (r"py:.*", r"(skyward[\w.]*\.)?([EPRT]\d?|Ts)(\.args|\.kwargs)?"),  # type variables
    # Types of parameters and results whose values come from public functions or are written as plain values.
    (r"py:class", r"skyward[\w.]*\.(AwsCall|ApiResponse|Clock|Decorator|EnvVars|InstanceWish|PoolParams|_\w+)"),
]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_type_aliases = {
    name: f"skyward.{name}" for name in ("Callback", "ProviderName", "SkywardEvent", "SpotLike")
}  # by their names, and not as what they stand for
autosummary_generate = False
napoleon_attr_annotations = True
napoleon_custom_sections = [("Fixtures", "params_style")]
napoleon_use_ivar = True
python_maximum_signature_line_length = 140  # of the text with full names, which pages shorten
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "Skyward"
html_static_path = ["images", "style"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "style/scorer.js")
html_favicon = "images/favicon.svg"
html_theme_options = {"light_logo": "logo-light.svg", "dark_logo": "logo-dark.svg", "sidebar_hide_name": True}
html_copy_source = False
html_show_sphinx = False


def keep_out_of_search(app: Sphinx, _: object) -> None:
    """Leave the decisions' text out of the search, which is for users."""
    if (name := app.env.docname).startswith("decisions/"):
        app.env.metadata[name]["nosearch"] = True


def setup(app: Sphinx) -> None:
    """Draw the pictures before the pages are read: a pool runs, about ten seconds long."""
    app.connect("doctree-read", keep_out_of_search)
    draw_all(DOCS / "images")
