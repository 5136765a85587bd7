"""The page that shows what each example prints, ``docs/examples/index.md``, compared with what it printed in a test.

With ``GALLERY=write`` in the environment the page, and its pictures, are replaced by what the tests got: run those that
print something else, in one process.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ELSEWHERE", "EXAMPLES", "PAGE", "Shown", "compare", "compare_picture", "shown"]

_ROOT = Path(__file__).parents[1]
EXAMPLES = _ROOT / "examples"
PAGE = _ROOT / "docs/examples/index.md"
_PICTURES = _ROOT / "docs/images"
_LARGEST_PICTURE = 60_000

ELSEWHERE = {
    "demo.py": "e2e/joblib/test_demos.py",
    "demo_ssh.py": "e2e/joblib/test_demos.py",
    "three_front_ends.py": "e2e/dask/test_dask_examples.py",
    "dask/arrays_and_frames.py": "e2e/dask/test_dask_examples.py",
    "dask/delayed.py": "e2e/dask/test_dask_examples.py",
    "dask/xgboost_training.py": "ml/test_examples.py",
    "data/s3_checkpoints.py": "e2e/machines/test_aws_examples.py",
    "providers/aws_search.py": "e2e/machines/test_aws_examples.py",
    "providers/aws_spot.py": "e2e/machines/test_aws_examples.py",
    "providers/aws_volume.py": "e2e/machines/test_aws_examples.py",
    "providers/digitalocean_droplets.py": "e2e/clouds/test_cloud_examples.py",
    "providers/many_clouds.py": "e2e/clouds/test_many_clouds.py",
    "providers/runpod_pods.py": "e2e/clouds/test_runpod_example.py",
    "providers/vastai_bids.py": "e2e/clouds/test_cloud_examples.py",
    "providers/verda_gpus.py": "e2e/clouds/test_verda_example.py",
} | {
    f"{folder.name}/{path.name}": test
    for folder, test in {
        EXAMPLES / "joblib": "e2e/joblib/test_examples.py",
        EXAMPLES / "training": "ml/test_examples.py",
    }.items()
    for path in folder.glob("*.py")
}
"""Tests of the examples that ``e2e/examples`` does not run: they need doubles, another backend or frameworks."""

_BLOCK = re.compile(r"^```console\n\$ python examples/(\S+)(.*)\n([\s\S]*?)^```$", re.MULTILINE)
_NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*(?:e[+-]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One example on the page: the arguments of its command, and its output."""

    arguments: tuple[str, ...]
    output: str


def shown() -> dict[str, Shown]:
    """Return the page's examples by their path below ``examples/``."""
    blocks = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    return {path: Shown(arguments=tuple(shlex.split(rest)), output=output) for path, rest, output in blocks}


def compare(example: str, printed: str, *, exactly: bool = True) -> None:
    """Assert that the page shows this output; without ``exactly`` numbers and runs of spaces may differ."""
    page = shown()[example]
    printed = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    if os.environ.get("GALLERY") == "write":
        if _masked(page.output) != _masked(printed) or exactly:
            _replace(example, printed)
        return
    mask = str if exactly else _masked
    assert mask(page.output) == mask(printed), f"{PAGE.name} shows another output of {example}; see {__file__}"


def compare_picture(example: str, picture: Path) -> None:
    """Assert that the example drew the picture of the page: of the same kind, and small."""
    name = f"{Path(example).stem}{picture.suffix}"
    assert f"(../images/{name})" in PAGE.read_text(encoding="utf-8")
    if os.environ.get("GALLERY") == "write":
        shutil.copyfile(picture, _PICTURES / name)
    for file in (picture, _PICTURES / name):
        assert 1000 < file.stat().st_size < _LARGEST_PICTURE
    assert picture.read_bytes()[:4] == (_PICTURES / name).read_bytes()[:4]


def _masked(text: str) -> list[str]:
    return [" ".join(_NUMBER.sub("#", line).split()) for line in text.splitlines()]


def _replace(example: str, printed: str) -> None:
    def block(found: re.Match[str]) -> str:
        output = printed if found[1] == example else found[3]
        return f"```console\n$ python examples/{found[1]}{found[2]}\n{output}```"

    PAGE.write_text(_BLOCK.sub(block, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
