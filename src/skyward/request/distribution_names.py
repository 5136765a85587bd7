"""Names of distributions on the package index: Skyward's, and those whose modules have other names."""

from __future__ import annotations

import re
from typing import Final

DISTRIBUTION: Final = "skyward-fleet"
"""Name of the distribution that holds Skyward's packages; on the public index, ``skyward`` is another project."""

_DISTRIBUTIONS: Final = {
    "Crypto": "pycryptodome",
    "MySQLdb": "mysqlclient",
    "OpenSSL": "pyopenssl",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "git": "gitpython",
    "github": "pygithub",
    "imblearn": "imbalanced-learn",
    "jose": "python-jose",
    "jwt": "pyjwt",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "osgeo": "gdal",
    "pkg_resources": "setuptools",
    "pptx": "python-pptx",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slugify": "python-slugify",
    "umap": "umap-learn",
    "usb": "pyusb",
    "wx": "wxpython",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Distributions by the top-level modules that they provide."""


_NOT_ON_THE_INDEX: Final = frozenset({"PIL", "cv2", "skimage", "sklearn"})


def misnamed(requirement: str) -> str:
    """Return the distribution that a requirement means by the name of a module; empty if it names a distribution.

    Only for names under which the public index has nothing that can be installed.
    """
    name = re.match(r"[\w.-]*", requirement.strip())
    return _DISTRIBUTIONS[name[0]] if name is not None and name[0] in _NOT_ON_THE_INDEX else ""


def distribution_of_module(name: str) -> str:
    """Return the distribution that provides a module, by its full name; its top-level package if it is unknown."""
    package = name.partition(".")[0]
    return _DISTRIBUTIONS.get(package, package)
