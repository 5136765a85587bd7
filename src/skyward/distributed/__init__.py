"""Distributed training: decorators after which a framework's own machinery is set up, on every worker of the call.

::

    @sky.compute
    @sky.distributed.torch()
    def train(): ...

    train() @ pool

The function runs once on every worker, and all of them are one training: rank is the worker's position in the call,
world their number. It works on one worker too. The workers begin together and end together: when one raises or dies,
the others end with that one's cause. What is set up is taken down after the function, so that one training can follow
another. The order of the two decorators does not matter.
"""

from __future__ import annotations

from skyward.distributed._jax import jax
from skyward.distributed._keras import keras
from skyward.distributed._tensorflow import tensorflow
from skyward.distributed._torch import torch
from skyward.distributed._transformers import transformers

__all__ = ["jax", "keras", "tensorflow", "torch", "transformers"]
