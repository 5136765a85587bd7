"""Every accelerator of the catalogue as a function: ``sky.accelerators.A100(count=4)``.

The same as ``Accelerator.NVIDIA.A100(count=4)``, with the vendors' names left out.
"""

from __future__ import annotations

from skyward.request.accelerators import Accelerator

__all__ = [
    "A10",
    "A10G",
    "A30",
    "A40",
    "A100",
    "B100",
    "B200",
    "B300",
    "GB200",
    "GH200",
    "H100",
    "H200",
    "L4",
    "L40",
    "L40S",
    "MI",
    "RTX_3070",
    "RTX_3080",
    "RTX_3090",
    "RTX_4080",
    "RTX_4080_SUPER",
    "RTX_4090",
    "RTX_5080",
    "RTX_5090",
    "RTX_A2000",
    "RTX_A4000",
    "RTX_A4500",
    "RTX_A5000",
    "RTX_A6000",
    "RTX_PRO_6000",
    "T4",
    "TPU",
    "V100",
    "Inferentia",
    "RTX_2000_Ada",
    "RTX_3080_Ti",
    "RTX_3090_Ti",
    "RTX_4000_Ada",
    "RTX_4070_Ti",
    "RTX_5000_Ada",
    "RTX_6000_Ada",
    "RadeonPro",
    "T4g",
    "TPUSlice",
    "Trainium",
]

H100 = Accelerator.NVIDIA.H100
A100 = Accelerator.NVIDIA.A100
V100 = Accelerator.NVIDIA.V100
H200 = Accelerator.NVIDIA.H200
B100 = Accelerator.NVIDIA.B100
B200 = Accelerator.NVIDIA.B200
B300 = Accelerator.NVIDIA.B300
GB200 = Accelerator.NVIDIA.GB200
GH200 = Accelerator.NVIDIA.GH200
L4 = Accelerator.NVIDIA.L4
L40 = Accelerator.NVIDIA.L40
L40S = Accelerator.NVIDIA.L40S
T4 = Accelerator.NVIDIA.T4
T4g = Accelerator.NVIDIA.T4g
A10 = Accelerator.NVIDIA.A10
A10G = Accelerator.NVIDIA.A10G
A30 = Accelerator.NVIDIA.A30
A40 = Accelerator.NVIDIA.A40
RTX_A2000 = Accelerator.NVIDIA.RTX_A2000
RTX_A4000 = Accelerator.NVIDIA.RTX_A4000
RTX_A4500 = Accelerator.NVIDIA.RTX_A4500
RTX_A5000 = Accelerator.NVIDIA.RTX_A5000
RTX_A6000 = Accelerator.NVIDIA.RTX_A6000
RTX_2000_Ada = Accelerator.NVIDIA.RTX_2000_Ada
RTX_4000_Ada = Accelerator.NVIDIA.RTX_4000_Ada
RTX_5000_Ada = Accelerator.NVIDIA.RTX_5000_Ada
RTX_6000_Ada = Accelerator.NVIDIA.RTX_6000_Ada
RTX_PRO_6000 = Accelerator.NVIDIA.RTX_PRO_6000
RTX_3070 = Accelerator.NVIDIA.RTX_3070
RTX_3080 = Accelerator.NVIDIA.RTX_3080
RTX_3080_Ti = Accelerator.NVIDIA.RTX_3080_Ti
RTX_3090 = Accelerator.NVIDIA.RTX_3090
RTX_3090_Ti = Accelerator.NVIDIA.RTX_3090_Ti
RTX_4070_Ti = Accelerator.NVIDIA.RTX_4070_Ti
RTX_4080 = Accelerator.NVIDIA.RTX_4080
RTX_4080_SUPER = Accelerator.NVIDIA.RTX_4080_SUPER
RTX_4090 = Accelerator.NVIDIA.RTX_4090
RTX_5080 = Accelerator.NVIDIA.RTX_5080
RTX_5090 = Accelerator.NVIDIA.RTX_5090

Trainium = Accelerator.AWS.Trainium
Inferentia = Accelerator.AWS.Inferentia

TPU = Accelerator.Google.TPU
TPUSlice = Accelerator.Google.TPUSlice

MI = Accelerator.AMD.MI
RadeonPro = Accelerator.AMD.RadeonPro
