"""Distributed training: decorators that initialize a framework on every worker of a call.

::

    @sky.compute
    @sky.distributed.torch()
    def train(): ...

    train() @ pool

The function runs once on every worker, as one training: rank is the worker's position in the call, world the number of
workers. It works on one worker too. The workers begin and end together: when one raises or dies, the others end with
the same cause. The framework is shut down after the function, so that another training can follow. The order of the two
decorators does not matter.
"""

from __future__ import annotations

from skyward.distributed._jax import jax
from skyward.distributed._keras import keras
from skyward.distributed._tensorflow import tensorflow
from skyward.distributed._torch import torch
from skyward.distributed._transformers import transformers

__all__ = ["jax", "keras", "tensorflow", "torch", "transformers"]
