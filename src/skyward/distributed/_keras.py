"""Keras on the workers of a call: distribution by its backend, with keras's own on top."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

from skyward.distributed._gang import Decorator, Gang, GangSession, checked_backend, decorator, environment, imported
from skyward.distributed._jax import JaxSession
from skyward.distributed._tensorflow import TensorflowSession
from skyward.distributed._torch import TorchSession
from skyward.distributed.runtime import FreshProcessNeeded, current_call

_SESSIONS: Final[Mapping[str, Callable[[], GangSession]]] = {
    "jax": JaxSession,
    "tensorflow": TensorflowSession,
    "torch": partial(TorchSession, None),
}
_VARIABLE = "KERAS_BACKEND"
_SEEDS = 2**32


def keras(backend: str | None = None) -> Decorator:
    """Run the function with keras on ``backend``, which is initialized as by the backend's own decorator.

    All workers begin with the same random seed, a different one in every call, so that their models begin alike.

    - ``"jax"``: a ``keras.distribution.DataParallel`` over the devices of all workers is active. Every worker passes
      its own part of the data, such as from :func:`skyward.shard`, and its own batch size to ``fit``. A step trains on
      the batches of all workers together. All workers must run the same number of steps.
    - ``"tensorflow"``: the function runs in the scope of a ``MultiWorkerMirroredStrategy``. Every worker passes
      all data, which TensorFlow divides among them, and the global batch size to ``fit``. A ``tf.data`` data set that
      holds one worker's part needs the option ``AutoShardPolicy.OFF``.
    - ``"torch"``: the process group exists, but keras does not average gradients over it: wrap the model in
      ``DistributedDataParallel`` in your own training loop, or average gradients in a ``train_step``.

    Args:
        backend: ``"jax"``, ``"tensorflow"`` or ``"torch"``; None selects the node's
            ``KERAS_BACKEND``, else jax.

    Raises:
        ConfigurationError: the backend does not exist; in the call: keras or its backend is not installed on the node.
    """
    return decorator(partial(KerasSession, checked_backend(backend, tuple(_SESSIONS), "keras")))


class KerasSession:
    """Session of a backend, with keras configured for it.

    Attributes:
        port: port of the backend's session.
        gpus: GPUs of the backend's session.
    """

    def __init__(self, backend: str | None) -> None:
        of_node = checked_backend(os.environ.get(_VARIABLE), tuple(_SESSIONS), "keras")
        self._backend = backend = backend or of_node or "jax"
        self._inner: GangSession = _SESSIONS[backend]()
        self.port, self.gpus = self._inner.port, self._inner.gpus
        with environment({_VARIABLE: backend}):
            self._keras: Any = imported("keras", pip="keras")
        used = self._keras.backend.backend()
        if used != backend:
            raise FreshProcessNeeded(f"keras is already in use in this process on {used}, not on {backend}")

    @contextmanager
    def join(self, gang: Gang) -> Generator[None]:
        """See :meth:`~skyward.distributed._gang.GangSession.join`."""
        with ExitStack() as stack:
            stack.enter_context(environment({_VARIABLE: self._backend}))
            stack.enter_context(self._inner.join(gang))
            keras = self._keras
            keras.utils.clear_session()  # it holds arrays on devices that no longer exist
            stack.callback(keras.utils.clear_session)
            match self._backend:
                case "jax":
                    stack.enter_context(_data_parallel(keras))
                case "tensorflow":
                    stack.enter_context(_multi_worker_strategy().scope())
                case _:
                    pass
            if (call := current_call()) is not None:
                _seed(keras, call.seed % _SEEDS)
            yield


def _seed(keras: Any, seed: int) -> None:
    """Seed twice: the first time keras may load TensorFlow, which draws from the generator just seeded."""
    for _ in range(2):
        keras.utils.set_random_seed(seed)


@contextmanager
def _data_parallel(keras: Any) -> Generator[None]:
    """Replicate weights over the devices of all workers, while each device takes the data of its own worker."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def _multi_worker_strategy() -> Any:
    """Return TensorFlow's strategy for several workers, with the reductions that keras needs.

    Keras reduces a batch's features and targets at once, and losses over a dimension that they lack. TensorFlow's own
    strategy refuses both, and so every ``fit`` on more than one worker.
    """
    tf: Any = imported("tensorflow", pip="tensorflow")
    of_tensorflow: Any = tf.distribute.MultiWorkerMirroredStrategy

    class Strategy(of_tensorflow):
        def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
            def reduce_part(part: Any) -> Any:
                is_number = not self.experimental_local_results(part)[0].shape.rank
                return of_tensorflow.reduce(self, reduce_op, part, None if is_number else axis)

            return tf.nest.map_structure(reduce_part, value)

    return Strategy()
