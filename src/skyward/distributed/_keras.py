"""Keras on the workers of a call: its backend's way of working together, and its own on top."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from skyward.distributed._gang import Framework, Gang, GangSession, checked_backend, decorator, environment, imported
from skyward.distributed._jax import JaxFramework
from skyward.distributed._tensorflow import TensorflowFramework
from skyward.distributed._torch import TorchFramework
from skyward.distributed.runtime import FreshProcessNeeded, current_call

__all__ = ["KerasFramework", "KerasSession", "keras"]

P = ParamSpec("P")
R = TypeVar("R")

_FRAMEWORKS: Final[dict[str, Framework]] = {
    "jax": JaxFramework(),
    "tensorflow": TensorflowFramework(),
    "torch": TorchFramework(backend=None),
}
_VARIABLE = "KERAS_BACKEND"
_SEEDS = 2**32


def keras(backend: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the function with keras on ``backend``, which is brought up as the decorator of its own would.

    All workers begin with the same random seed, another one in every call, so that their models begin alike.

    - ``"jax"``: a ``keras.distribution.DataParallel`` over the devices of all workers is in force. Every worker gives
      ``fit`` its own part of the data, such as :func:`skyward.shard` makes, and its own batch size; a step trains on
      the batches of all workers together. All of them must make equally many steps.
    - ``"tensorflow"``: the function runs in the scope of a ``MultiWorkerMirroredStrategy``. Every worker gives ``fit``
      all of the data, which TensorFlow deals to them, and the batch size of all together. A ``tf.data`` set that holds
      one worker's part has ``AutoShardPolicy.OFF`` among its options.
    - ``"torch"``: the process group is there, but keras does not average gradients over it: wrap the model in
      ``DistributedDataParallel`` in a training loop of your own, or average them in a ``train_step``.

    Args:
        backend: ``"jax"``, ``"tensorflow"`` or ``"torch"``; None takes what the node's ``KERAS_BACKEND`` says,
            else jax.

    Raises:
        ConfigurationError: there is no such backend; in the call: keras or its backend is not installed on the node.
    """
    return decorator(KerasFramework(backend=checked_backend(backend, tuple(_FRAMEWORKS), "keras")))


@dataclass(frozen=True, slots=True, kw_only=True)
class KerasFramework:
    """Opens sessions of keras.

    Attributes:
        backend: see :func:`keras`.
    """

    backend: str | None

    def session(self) -> KerasSession:
        """See :meth:`~skyward.distributed._gang.Framework.session`."""
        said = checked_backend(os.environ.get(_VARIABLE), tuple(_FRAMEWORKS), "keras")
        return KerasSession(self.backend or said or "jax")


class KerasSession:
    """One session of a backend, with keras set to it.

    Attributes:
        port: the backend's.
        gpus: likewise.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._inner: GangSession = _FRAMEWORKS[backend].session()
        self.port, self.gpus = self._inner.port, self._inner.gpus
        with environment({_VARIABLE: backend}):
            self._keras: Any = imported("keras", pip="keras")
        used = self._keras.backend.backend()
        if used != backend:
            raise FreshProcessNeeded(f"keras is in use on {used} in this process already, not on {backend}")

    @contextmanager
    def join(self, gang: Gang) -> Generator[None]:
        """See :meth:`~skyward.distributed._gang.GangSession.join`."""
        with ExitStack() as stack:
            stack.enter_context(environment({_VARIABLE: self._backend}))
            stack.enter_context(self._inner.join(gang))
            keras = self._keras
            keras.utils.clear_session()  # it keeps numbers on devices that are not there any more
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
    """Twice: the first time keras loads TensorFlow where it is installed, and that draws from what was just seeded."""
    for _ in range(2):
        keras.utils.set_random_seed(seed)


@contextmanager
def _data_parallel(keras: Any) -> Generator[None]:
    """Have keras give all workers' devices the same weights, and each its own worker's data."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def _multi_worker_strategy() -> Any:
    """The strategy of several workers, which takes what keras asks of it.

    That is the mean of a batch's features and targets at once, and the mean of losses over a dimension that they have
    not: TensorFlow's own refuses both, and with them every ``fit`` on more than one worker.
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
