from __future__ import annotations

import re
from pathlib import Path

from skyward import accelerators
from skyward.request.accelerators import Accelerator, Vendor, models


def test_functions_make_the_same_as_the_factories():
    assert accelerators.A100(count=2, memory="40GB") == Accelerator.NVIDIA.A100(count=2, memory="40GB")
    assert accelerators.Trainium(version=1) == Accelerator.AWS.Trainium(version=1)


def test_the_whole_catalogue_can_be_made():
    plain = [name for name in accelerators.__all__ if hasattr(Accelerator.NVIDIA, name)]
    made = {getattr(accelerators, name)().name for name in plain}
    made |= {accelerators.Trainium(version=version).name for version in (1, 2, 3)}
    made |= {accelerators.Inferentia(version=version).name for version in (1, 2)}
    made |= {accelerators.TPU(version=version).name for version in ("v2", "v3", "v4", "v5e", "v5p", "v6e")}
    amd = [model.name for model in models() if model.vendor is Vendor.AMD]
    made |= {accelerators.MI(name.removeprefix("MI")).name for name in amd if name.startswith("MI")}
    made |= {accelerators.RadeonPro(name.removeprefix("Radeon-Pro-")).name for name in amd if name.startswith("R")}

    assert made == {model.name for model in models()}


def test_the_stub_has_the_names_that_the_module_has():
    stub = Path(accelerators.__file__).with_suffix(".pyi").read_text(encoding="utf-8")

    assert re.findall(r"^(\w+) = (?:NVIDIA|Accelerator\.\w+)\.\1$", stub, re.MULTILINE) == accelerators.__all__
