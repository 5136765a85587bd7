"""Exceptions that calls raise: they come back as themselves, with the worker's traceback as their cause."""

from __future__ import annotations

import logging
import pickle
import traceback

from skyward.errors import RemoteError, RemoteTraceback
from skyward.hidden_frames import add_lines, hide_frames
from skyward.request.distribution_names import distribution_of_module
from skyward.shipping.pickling import Omissions, RaisedException, add_note, dump_object, set_cause
from skyward.wire.messages import PackedError

_logger = logging.getLogger("skyward.wire")


def pack_error(error: BaseException) -> PackedError:
    """Prepare an exception for its way back. Never raises."""
    return PackedError(
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        message=text_of(error),
        traceback=_traceback_of(error),
        pickled=_pickle_error(error),
    )


def unpack_error(packed: PackedError, *, where: str) -> BaseException:
    """Return the exception itself, with its remote traceback as ``__cause__`` and a note about ``where``.

    Falls back to :class:`~skyward.errors.RemoteError` where it cannot be rebuilt, and for ``SystemExit`` and the like:
    a call that exits must not end the client.
    """
    error: BaseException | None = None
    if packed.pickled:
        try:
            error = pickle.loads(packed.pickled)
        except KeyboardInterrupt:
            raise
        except BaseException as unpickling:  # any class may do anything here; the text remains
            where = f"{where}; rebuilding it here failed with {type(unpickling).__name__}: {unpickling}"
    if not isinstance(error, Exception):
        error = RemoteError(
            f"{packed.type_name}: {packed.message}", type_name=packed.type_name, remote_traceback=packed.traceback
        )
    # The frames are in the cause's text already; as they came, their lines would be read from this machine's files.
    error = error.with_traceback(None)
    set_cause(error, RemoteTraceback(add_lines(packed.traceback)))
    add_note(error, f"raised on {where}")
    if isinstance(error, ModuleNotFoundError):
        package = distribution_of_module(error.name or "…")
        add_note(error, f"if a package has it, name that in the pool's environment: Image(pip=[{package!r}])")
    return error


def text_of(error: BaseException) -> str:
    """Return the exception's text. Never raises."""
    try:
        return str(error)
    except BaseException as broken:  # user code may do anything here
        return f"<its __str__ raised {type(broken).__name__}>"


def _traceback_of(error: BaseException) -> str:
    try:
        hide_frames(error)
        return "".join(traceback.format_exception(error))
    except BaseException as broken:  # as above: it formats the exception's causes too
        return f"<formatting the traceback raised {type(broken).__name__}>"


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an exception so that it comes back as it is; return ``b""`` where it cannot be rebuilt.

    Rebuilding is tried here: a class's ``__init__`` may reject the contents of ``args``, or format them again. The
    first way that gives the same text is taken, otherwise the first that gives the same class.
    """
    if not isinstance(error, Exception):
        return b""
    shown, second_best = _shown(error), b""
    omissions = Omissions(None, is_result=True)
    ways = RaisedException(error, own_way=True), RaisedException(error), RaisedException(error, omissions=omissions)
    for candidate in ways:
        try:
            data, _ = dump_object(candidate, None, is_result=True)
            rebuilt = pickle.loads(data)
        except BaseException:  # a class that calls sys.exit() must not end the worker
            _logger.debug("cannot rebuild %s", type(error), exc_info=True)
            continue
        if type(rebuilt) is type(error):
            if _shown(rebuilt) == shown:
                return data
            second_best = second_best or data
    return second_best


def _shown(error: BaseException) -> tuple[str, str]:
    try:
        arguments = repr(error.args)
    except BaseException as broken:  # as above
        arguments = type(broken).__name__
    return text_of(error), arguments
