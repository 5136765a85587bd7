"""Distributed training: decorators after which a framework's own machinery is set up, on every worker of the call.

::

    @sky.compute
    @sky.distributed.torch()
    def train(): ...

    train() @ pool
"""
