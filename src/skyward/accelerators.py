"""Every accelerator of the catalogue as a function: ``sky.accelerators.A100(count=4)``.

The same as ``Accelerator.NVIDIA.A100(count=4)``, with the makers' names left out. ``accelerators.pyi`` lists the names.
"""

from __future__ import annotations

from skyward.request.accelerators import NVIDIA, Accelerator

_FUNCTIONS = {
    **NVIDIA.__members__,
    "Inferentia": Accelerator.AWS.Inferentia,
    "MI": Accelerator.AMD.MI,
    "RadeonPro": Accelerator.AMD.RadeonPro,
    "TPU": Accelerator.Google.TPU,
    "TPUSlice": Accelerator.Google.TPUSlice,
    "Trainium": Accelerator.AWS.Trainium,
}
__all__ = sorted(_FUNCTIONS)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]
globals().update(_FUNCTIONS)
