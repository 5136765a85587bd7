"""Pickling of calls and results, at both ends of a lane.

Functions and classes travel by name, those of the user's own modules next to the sources of these
(:mod:`skyward.shipping.project_modules`), so that a local ``helpers.py`` needs no packaging. By value travels what has
no name to be found by (:mod:`skyward.shipping.definitions`). Large buffers stay out of band (pickle
protocol 5), so that large arrays are never copied into a pickle.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, NoReturn, cast

import cloudpickle

from skyward.errors import SerializationError, SkywardError
from skyward.shipping import definitions
from skyward.shipping.project_modules import (
    SourceSet,
    Way,
    packages_around,
    report_assigned,
    source_set,
    way_of,
)
from skyward.shipping.received_modules import with_sources
from skyward.shipping.references import function_parts, imports_of, reached_from


class _Packing(threading.local):
    """What this thread pickles.

    Attributes:
        arguments_of: name of the function whose arguments it pickles; empty while it pickles none.
        of_result: whether it pickles a result.
        looking: whether a pickler asks each value for its class and its module.
    """

    arguments_of: str = ""
    of_result: bool = False
    looking: bool = False


packing: Final = _Packing()
LARGE_BYTES: Final = 1 << 20
"""Size in bytes from which buffers are kept out of the pickle."""
LARGE_HERE_BYTES: Final = 256 << 10
"""That size where client and node share memory: there a file costs less than TLS (docs/decisions/042)."""

PLAIN_TYPES: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Exact types whose values are small, immutable and pickled quickly."""


@dataclass(slots=True, kw_only=True)
class Packed:
    """A pickled object.

    Attributes:
        data: the pickle.
        buffers: its large buffers, which are kept out of band, flat, in the pickle's order.
        sources: the sources that must be there before it is unpickled; None if it needs none, or contains them.
    """

    # Not frozen, as that costs 0.5 µs, and it is paid for every call and every result.

    data: bytes
    buffers: tuple[memoryview, ...] = ()
    sources: SourceSet | None = None


def pack(obj: object, *, what: str, apart: bool = False, large_bytes: int = LARGE_BYTES) -> Packed:
    """Pickle ``obj`` for a worker; ``what`` names it in errors.

    Args:
        obj: the object.
        what: its name.
        apart: return the sources of the user's modules next to the pickle; otherwise it contains them.
        large_bytes: size in bytes from which buffers are kept out of the pickle.

    Raises:
        SerializationError: it cannot be pickled; the message names the offending part.
    """
    return _pack(obj, what, is_result=False, apart=apart, large_bytes=large_bytes)


def pack_result(obj: object, *, what: str, large_bytes: int = LARGE_BYTES) -> Packed:
    """Pickle ``obj``, a worker's result, for the client.

    The client's own classes, functions and modules go by name, and are its own again there.

    Raises:
        SerializationError: as :func:`pack`.
    """
    if type(obj) in PLAIN_TYPES:
        return Packed(data=pickle.dumps(obj, 5))
    packing.of_result = True
    try:
        return _pack(obj, what, is_result=True, apart=True, large_bytes=large_bytes)
    finally:
        packing.of_result = False


def _pack(obj: object, what: str, *, is_result: bool, apart: bool, large_bytes: int) -> Packed:
    if type(obj) in PLAIN_TYPES:  # no definitions in it: the plain pickler will do
        return Packed(data=pickle.dumps(obj, protocol=5))
    buffers: list[memoryview] = []

    def keep_out(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < large_bytes:
            return True
        buffers.append(view)
        return False

    try:
        try:
            data, pickler = dump_object(obj, keep_out, is_result=is_result)
        except Exception:  # again, without the dispensable parts of modules and classes
            buffers.clear()
            data, pickler = dump_object(
                obj, keep_out, is_result=is_result, omissions=Omissions(obj, is_result=is_result)
            )
    except SkywardError:
        raise
    except Exception as error:
        path, part, cause = _blame(obj, what, error, is_result=is_result)
        message = f"{path} cannot be pickled: {cause} (its type is {type(part).__module__}.{type(part).__qualname__})"
        raise SerializationError(message) from error
    needed = pickler.named | pickler.imported
    if is_result or not needed:
        return Packed(data=data, buffers=tuple(buffers))
    sources = source_set(needed)
    report_assigned(sources)
    if not apart and sources is not None:
        data, sources = with_sources(data, buffers, needed), None
    return Packed(data=data, buffers=tuple(buffers), sources=sources)


def pack_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], label: str, *, large_bytes: int = LARGE_BYTES
) -> Packed:
    """Pickle a call's arguments, as ``(args, kwargs)``; quickly where they are a few numbers and strings.

    Raises:
        SerializationError: as :func:`pack`.
    """
    if not kwargs and PLAIN_TYPES.issuperset(map(type, args)):
        return Packed(data=pickle.dumps((args, kwargs), protocol=5))
    packing.arguments_of = label
    try:
        return pack((args, kwargs), what=f"the arguments of {label}", apart=True, large_bytes=large_bytes)
    finally:
        packing.arguments_of = ""


def goes_by_name(value: type | ModuleType | Callable[..., Any]) -> bool:
    """Return True if nodes find this class, function or module under its name: they have its module, or its source."""
    is_module = isinstance(value, ModuleType)
    name = value.__name__ if is_module else getattr(value, "__module__", None) or "builtins"
    if not isinstance(name, str) or (way := way_of(name)) is Way.VALUE:
        return False
    if (registered := _registered()) and not registered.isdisjoint((name, *packages_around(name))):
        return False
    if is_module:  # another of that name may have been loaded from a file by hand, or before
        return sys.modules.get(name) is value or (way is Way.INSTALLED and name in sys.modules)
    return definitions.found_under_its_name(cast("type", value))


def _registered() -> set[str]:
    """Return the names of the modules that the user has told cloudpickle to send by value."""
    return cast("set[str]", cloudpickle.list_registry_pickle_by_value())


def naming_state() -> tuple[object, ...]:
    """Return a value that changes when other objects than before may be pickled by name."""
    return len(sys.modules), cast("set[str]", cloudpickle.list_registry_pickle_by_value())


def unpack(data: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Rebuild a packed object; arrays share the memory of ``buffers`` and are writable if those are."""
    return pickle.loads(data, buffers=buffers)


def unpack_call(data: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Rebuild a part of the client's call; its definitions go back to the client as the client's own."""
    return unpack_call_with_main(data, buffers)[0]


def unpack_call_with_main(data: bytes | memoryview, buffers: Sequence[Any] = ()) -> tuple[Any, ModuleType | None]:
    """Rebuild a part of the client's call; return it with the module of what it has from the client's ``__main__``."""
    outside = definitions.receiving.active, definitions.receiving.main
    definitions.receiving.active, definitions.receiving.main = True, None
    try:
        return pickle.loads(data, buffers=buffers), definitions.receiving.main
    finally:
        definitions.receiving.active, definitions.receiving.main = outside


# Classes and functions, by id, which went by name before, with their modules: to find that out costs more than all else
# of a small pickle. It holds while the modules that the user sends by value are the same ones.
_by_name: dict[int, tuple[Any, str]] = {}
_by_value: set[str] = set()


def _is_there_still(obj: Any) -> bool:
    return vars(sys.modules.get(obj.__module__, pickle)).get(obj.__name__) is obj


class _Pickler(cloudpickle.Pickler):
    """Cloudpickle's pickler, which decides by the owner of a module what goes by value.

    Args:
        file: receiver of the pickle.
        buffer_callback: see :class:`pickle.Pickler`.
        is_result: True for a pickle from a worker to the client.
        omissions: chooses the parts of definitions to leave out; None leaves out nothing.

    Attributes:
        named: the user's modules with definitions that go by name.
        imported: all modules that functions sent by value import while they run.
    """

    def __init__(
        self,
        file: io.BytesIO,
        buffer_callback: Callable[[pickle.PickleBuffer], bool] | None,
        *,
        is_result: bool,
        omissions: Omissions | None = None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.named: set[str] = set()
        self.imported: set[str] = set()
        self._is_result = is_result
        self._mains: dict[int, definitions.MainNames] = {}
        self.omissions = omissions

    def dump_whole(self, obj: object) -> None:
        """Pickle an object; stand-ins in it may be asked for their class."""
        before, packing.looking = packing.looking, True
        try:
            self.dump(obj)
        finally:
            packing.looking = before

    def reducer_override(self, obj: Any) -> Any:
        known = _by_name.get(id(obj))
        if known is not None and known[0] is obj and _is_there_still(obj):
            if known[1]:
                self.named.add(known[1])
            return NotImplemented
        value = cast("object", obj)
        if isinstance(value, type) or type(value) in (FunctionType, ModuleType):
            return self._reduce_definition(cast("definitions.Definition", value))
        if isinstance(value, CodeType):
            return _with_file_name(value, cast("Any", self.dispatch_table)[CodeType](value))
        if issubclass(type(value), BaseException):
            return reduced_exception(cast("BaseException", value), self._is_obstacle)
        if type(value) is _CachingFunction and not goes_by_name(cast("Any", value)):
            caching = cast("Any", value)
            return _caching, (caching.__wrapped__, caching.cache_parameters())
        if (single := definitions.reduced_single(value, goes_by_name)) is not None:
            return single
        self._note(getattr(obj, "__module__", None))  # it may go by name, as a NewType does
        return NotImplemented

    def _note(self, module: object) -> bool:
        """Return True for a module of the user's, whose source the pickle needs."""
        is_own = isinstance(module, str) and way_of(module) is Way.SOURCE
        if is_own:
            self.named.add(cast("str", module))
        return is_own

    def _is_obstacle(self, value: object) -> bool:
        return self.omissions is not None and bool(self.omissions.obstacle(value))

    def _reduce_definition(self, obj: definitions.Definition) -> Any:
        if self._is_result and (named := definitions.reduced_to_name(obj)) is not None:
            return named
        if goes_by_name(obj):
            module = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__
            is_own = self._note(module)
            if isinstance(obj, type) and issubclass(obj, Warning) and not is_own and module != "builtins":
                return _warning, (module, obj.__qualname__)
            if not isinstance(obj, ModuleType):
                _by_name[id(obj)] = obj, module if is_own else ""
            return NotImplemented
        if isinstance(obj, ModuleType):
            names = {name: value for name, value in vars(obj).items() if name != "__builtins__"}
            return definitions.reduced_module(
                obj, self._sent(names, f"module {obj.__name__}"), is_result=self._is_result
            )
        if isinstance(obj, FunctionType):
            return self._reduce_function(obj)
        if (reduced := definitions.reduced_compiled(obj)) is not None:
            return reduced
        own = self._sent(definitions.own_attributes(obj), f"class {obj.__qualname__}")
        return definitions.reduced_class(obj, own, is_result=self._is_result)

    def _reduce_function(self, function: FunctionType) -> definitions.Reduced:
        if definitions.is_single_dispatch(function):
            reduced = definitions.reduced_dispatch(function)
        else:
            self.imported |= imports_of(function)
            reduced = cast("Any", self)._dynamic_function_reduce(function)  # noqa: SLF001 - there is no public way
            make, (code, names, *empty), (own, slots), *rest = reduced
            if names.get("__name__") == definitions.MAIN and not self._is_result:  # a wrapper takes over `__module__`
                names = self._mains.setdefault(id(names), definitions.MainNames(names))
                slots["__globals__"] |= definitions.annotated_names(function)
            if self.omissions is not None and not self.omissions.is_needed(function):
                slots["__globals__"] = self._sent(slots["__globals__"], f"module {function.__module__}")
            reduced = make, (code, names, *empty), (own, slots), *rest
        return reduced if self._is_result else definitions.reduced_with_origin(function, reduced)

    def _sent(self, names: dict[str, Any], where: str) -> dict[str, Any]:
        return names if self.omissions is None else self.omissions.replaced(names, where)


_FILE_NAME = 10
"""Position of the file's name among the arguments of ``CodeType``."""


def _with_file_name(code: CodeType, reduced: tuple[type, tuple[Any, ...]]) -> tuple[type, tuple[Any, ...]]:
    """Return cloudpickle's reduction of ``code`` with the name of its file, by which tracebacks find their lines.

    cloudpickle 3.1.3 replaces it with ``<dynamic-code>``. The copy is as anonymous as cloudpickle's strings: pickles
    must not depend on which strings the interpreter shares.
    """
    made_by, arguments = reduced
    return made_by, (*arguments[:_FILE_NAME], "".join(code.co_filename), *arguments[_FILE_NAME + 1 :])


# Functions with functools.cache or lru_cache. They would go by name even if their modules go by value.
_CachingFunction: Final = type(functools.cache(str))


def _caching(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    return functools.lru_cache(**parameters)(function)


@functools.cache
def _warning(module: str, name: str) -> type[Warning]:
    """Return a package's class of warnings, or a stand-in of that name where the package is missing."""
    # Filters for warnings travel with scikit-learn's tasks, also those of packages that nodes do not have. There
    # nothing can warn with the class, so that a stand-in does.
    try:
        return cast("type[Warning]", functools.reduce(getattr, name.split("."), importlib.import_module(module)))
    except (ImportError, AttributeError):
        return type(name, (Warning,), {"__module__": module})


def dump_object(
    obj: object,
    buffer_callback: Callable[[pickle.PickleBuffer], bool] | None,
    *,
    is_result: bool,
    omissions: Omissions | None = None,
) -> tuple[bytes, _Pickler]:
    """Pickle an object; return the pickle and its pickler. Raises whatever a class raises."""
    if (registered := _registered()) != _by_value:
        _by_name.clear()
        _by_value.clear()
        _by_value.update(registered)
    with io.BytesIO() as file:
        pickler = _Pickler(file, buffer_callback, is_result=is_result, omissions=omissions)
        pickler.dump_whole(obj)
        return file.getvalue(), pickler


def _blame(
    obj: object, path: str, error: Exception, *, is_result: bool, depth: int = 4
) -> tuple[str, object, Exception]:
    """Return the smallest part of ``obj`` that fails to pickle by itself, its path and its error."""
    for name, child in _children(obj) if depth else ():
        if (inner := Omissions(child, is_result=is_result).failure(child)) is not None:
            return _blame(child, f"{path}{name}", inner, is_result=is_result, depth=depth - 1)
    return path, obj, error


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    match obj:
        case Mapping():
            yield from ((f"[{key!r}]", value) for key, value in cast("Mapping[Any, Any]", obj).items())
        case list() | tuple() | set() | frozenset():
            yield from ((f"[{index}]", value) for index, value in enumerate(cast("Iterable[Any]", obj)))
        case MethodType():
            yield "", obj.__func__
            yield ".__self__", obj.__self__
        case _ if inspect.isfunction(obj):
            variables = inspect.getclosurevars(inspect.unwrap(obj))
            for name, value in (*variables.nonlocals.items(), *variables.globals.items()):
                if value is not obj:
                    yield f" → its variable {name!r}", value
        case _:
            yield from ((f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items())


# --- what is left out --------------------------------------------------------------------------------------------
# A module or a class takes everything along that is in it, a lock or a connection included, which the call may never
# use. A stand-in that raises on its first use replaces it. References of the call's own function, directly or through
# other functions, are no such part: they are needed, and the error is raised before anything is sent.


class LeftOut:
    """Stand-in for an object that could not be pickled: all but ``repr`` raises SerializationError with ``text``."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        object.__setattr__(self, "_text", text)

    def __reduce__(self) -> tuple[Any, ...]:
        return LeftOut, (object.__getattribute__(self, "_text"),)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_text')}>"

    def __getattribute__(self, name: str) -> Any:
        if packing.looking or name in _OF_COPIES:
            return object.__getattribute__(self, name)
        if name in _ABSENT:
            raise AttributeError(name)
        raise SerializationError(object.__getattribute__(self, "_text"))


_OF_COPIES: Final = frozenset({"__reduce__", "__reduce_ex__"})
_ABSENT: Final = frozenset({"__copy__", "__deepcopy__", "__isabstractmethod__", "__wrapped__"})
"""Names that copies of an object with a stand-in, subclasses of a class with one, and signatures look for."""


def _raise(self: Any, *_: object, **__: object) -> NoReturn:
    raise SerializationError(object.__getattribute__(self, "_text"))


_BINARY: Final = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or".split()  # noqa: SIM905
_OPERATIONS: Final = """
    eq ne lt le gt ge hash bool str format bytes len length_hint contains getitem setitem delitem iter next reversed
    call enter exit aenter aexit await aiter anext int float complex index round trunc floor ceil neg pos abs invert
    get setattr delattr fspath dir instancecheck subclasscheck mro_entries
"""
for _operation in (*_OPERATIONS.split(), *(f"{side}{each}" for each in _BINARY for side in ("", "r", "i"))):
    setattr(LeftOut, f"__{_operation}__", _raise)


_ADVICE: Final = (
    "Create it inside the function that uses it, or install the module on the nodes as a package: Image(pip=[…])"
)


class Omissions:
    """Choice of the parts that are left out of one pickle.

    Args:
        root: the object that is pickled.
        is_result: whether it is a result.
    """

    def __init__(self, root: object, *, is_result: bool) -> None:
        self._is_result = is_result
        # By id, as values need not be hashable, and may define equality in any way.
        self._picklable: set[int] = set()
        self._obstacles: dict[int, str] = {}
        self._kept_alive: list[object] = []
        self._needed = {id(value) for value in reached_from(root) if type(value) is FunctionType}

    def is_needed(self, function: FunctionType) -> bool:
        """Return True for a function that the root is, holds, or refers to through functions alone."""
        return id(function) in self._needed

    def is_picklable(self, value: object) -> bool:
        """Return True if a trial has pickled ``value``."""
        # Without this, a value would be tried again for every other one around it.
        return id(value) in self._picklable

    def replaced(self, names: Mapping[str, Any], where: str, advice: str = _ADVICE) -> dict[str, Any]:
        """Return ``names`` with stand-ins for the values that cannot be pickled."""
        sent: dict[str, Any] = {}
        for name, value in names.items():
            if not (why := self.obstacle(value)):
                sent[name] = value
            elif not name.startswith("__"):  # such as __spec__
                sent[name] = LeftOut(
                    f"{name!r} of {where} was left out when it was sent to this process: it cannot be pickled ({why}). "
                    f"{advice}"
                )
        return sent

    def replaced_items(self, values: tuple[Any, ...], where: str, advice: str) -> tuple[Any, ...]:
        """Return ``values`` with stand-ins for those that cannot be pickled."""
        return (
            *self.replaced({f"args[{index}]": value for index, value in enumerate(values)}, where, advice).values(),
        )

    def obstacle(self, value: object) -> str:
        """Return why ``value`` cannot be pickled; empty if it can."""
        if self.is_picklable(value):
            return ""
        if (known := self._obstacles.get(id(value))) is not None:
            return known
        self._kept_alive.append(value)
        self._obstacles[id(value)] = why = ""  # it may refer to itself
        if isinstance(value, FunctionType):
            why = next((why for part in function_parts(value) if (why := self.obstacle(part))), "")
        elif not isinstance(value, type | ModuleType):  # parts of these are left out in their turn
            error = self.failure(value)
            why = "" if error is None else str(error) or type(error).__name__
        self._obstacles[id(value)] = why
        return why

    def failure(self, value: object) -> Exception | None:
        """Return the error with which the pickling of ``value`` fails."""
        with io.BytesIO() as file:
            trial = _Trial(file, _keep_out_all, is_result=self._is_result, omissions=self)
            try:
                trial.dump_whole(value)
            except Exception as error:  # any class may do anything here
                return error
        self._kept_alive += trial.parts
        self._picklable.update(map(id, trial.parts))
        return None


def _keep_out_all(_: pickle.PickleBuffer) -> bool:
    return False


class _Trial(_Pickler):
    """Pickler that only tries; it passes over parts that an earlier trial has pickled.

    Attributes:
        parts: the parts that were pickled.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parts: list[object] = []

    def reducer_override(self, obj: Any) -> Any:
        if obj is not int and cast("Omissions", self.omissions).is_picklable(obj):
            return int, ()  # a small stand-in
        self.parts.append(obj)
        return super().reducer_override(obj)


# --- exceptions as values ----------------------------------------------------------------------------------------
# By default a pickle calls the class with `args`, which an own `__init__` may not take, and drops what is neither in
# `args` nor in `__dict__`. Here an exception is made by the constructor of its nearest builtin class, without its own
# `__init__`, and gets its attributes, slots, notes, cause and context.

_HEAP_TYPE: Final = 1 << 9
_LEFT_BEHIND: Final = frozenset({"exceptions", "message", "obj"})
"""Fields that a constructor has set for good; and the object of an AttributeError, which may be of any size."""
# Past a `__setattr__` of the class: those of frozen dataclasses refuse everything.
_set: Final = cast("Callable[[BaseException, str, Any], None]", object.__setattr__)


def set_cause(error: BaseException, cause: BaseException | None) -> None:
    """Set the cause of an exception, be its class frozen or not."""
    _set(error, "__cause__", cause)


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, be its class frozen or not."""
    _set(error, "__notes__", [*getattr(error, "__notes__", ()), note])


class RaisedException:
    """Pickle of an exception that a call raised, without its cause: that will be the traceback on the worker.

    Args:
        error: the exception.
        own_way: whether its class's own ``__reduce__`` is used if it has one.
        omissions: replaces the attributes that cannot be pickled; None replaces none.
    """

    def __init__(self, error: BaseException, *, own_way: bool = False, omissions: Omissions | None = None) -> None:
        self._error = error
        self._own_way = own_way
        self._omissions = omissions

    def __reduce__(self) -> str | definitions.Reduced:
        own = _own_reduction(self._error) if self._own_way else None
        return own or _reduced_error(self._error, None, None, self._omissions)


def reduced_exception(error: BaseException, is_obstacle: Callable[[object], object]) -> str | definitions.Reduced:
    """Return the reduction of an exception.

    Args:
        error: the exception.
        is_obstacle: returns a true value for an object that cannot be pickled; such a cause or context is left out.
    """
    if (own := _own_reduction(error)) is not None:
        return own
    cause, context = error.__cause__, error.__context__
    return _reduced_error(error, None if is_obstacle(cause) else cause, None if is_obstacle(context) else context)


def _own_reduction(error: BaseException) -> str | definitions.Reduced | None:
    """Return the reduction that the author of the class has written; None if there is none."""
    cls = type(error)
    registered = cast("dict[type, Any]", copyreg.dispatch_table).get(cls)
    # tblib, which Dask installs, registers all classes: it calls them with `args`, and loses other attributes.
    if registered is not None and not registered.__module__.startswith("tblib"):
        return registered(error)
    own = cls.__mro__[: cls.__mro__.index(_builtin_base(cls))]
    if any({"__reduce__", "__reduce_ex__"} & vars(base).keys() for base in own):
        return error.__reduce_ex__(5)
    return None


def _reduced_error(
    error: BaseException,
    cause: BaseException | None,
    context: BaseException | None,
    omissions: Omissions | None = None,
) -> definitions.Reduced:
    cls = type(error)
    base = _builtin_base(cls)
    _, args, *rest = cast("definitions.Reduced", base.__reduce__(error))
    if isinstance(error, BaseExceptionGroup):  # an own `__new__` may take more than its base's
        args = (error.message, cast("Any", error).exceptions)
    state = cast("dict[str, Any]", rest[0] if rest else None) or {}
    slots, shown = _slots_of(cast("BaseException", error)), error.args
    if omissions is not None:
        where, advice = f"the exception {cls.__qualname__}", "Give the exception what can be pickled"
        state, slots = omissions.replaced(state, where, advice), omissions.replaced(slots, where, advice)
        args, shown = (omissions.replaced_items(values, where, advice) for values in (args, shown))
    chain = cause, context, error.__suppress_context__
    return _make_error, (cls, base, args, shown), (state, slots, chain), None, None, _complete_error


def _builtin_base(cls: type[BaseException]) -> type[BaseException]:
    return next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)


def _slots_of(error: BaseException) -> dict[str, Any]:
    """Return the values of slots, and of the fields of builtin classes, such as ``name`` of an AttributeError."""
    names = [
        name
        for base in type(error).__mro__
        for name, value in vars(base).items()
        if isinstance(value, MemberDescriptorType) and not name.startswith("__") and name not in _LEFT_BEHIND
    ]
    return {name: value for name in names if (value := getattr(error, name, None)) is not None}


def _make_error(
    cls: type[BaseException], base: type[BaseException], args: tuple[Any, ...], shown: tuple[Any, ...]
) -> BaseException:
    try:
        error = base.__new__(cls, *args)
        base.__init__(error, *args)
    except (TypeError, ValueError):  # `args` were set by hand
        error = base.__new__(cls)
    _set(error, "args", shown)
    return error


def _complete_error(error: BaseException, state: tuple[dict[str, Any], dict[str, Any], tuple[Any, Any, bool]]) -> None:
    own, slots, (cause, context, suppressed) = state
    if type(error).__setstate__ is BaseException.__setstate__:
        for name, value in own.items():
            try:
                _set(error, name, value)
            except (AttributeError, TypeError):  # a property of that name
                error.__dict__[name] = value
    else:
        cast("Any", error).__setstate__(own)
    for name, value in slots.items():
        with suppress(AttributeError, TypeError):
            _set(error, name, value)
    set_cause(error, cause)
    _set(error, "__context__", context)
    _set(error, "__suppress_context__", suppressed)
