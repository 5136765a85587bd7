from __future__ import annotations

import subprocess
import sys

RAISE = """
import resource
from skyward.node.processes import raise_descriptor_limit

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65536), hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, 200)
"""


def test_a_supervisor_may_open_as_many_files_as_the_system_allows() -> None:
    subprocess.run([sys.executable, "-c", RAISE], check=True)
