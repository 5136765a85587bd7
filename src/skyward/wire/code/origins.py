"""Identity of the classes, functions and modules that travel by value.

A call brings definitions to its worker, whose copies follow changes that are made where they come from. On the way
back, an object that came with a call under a name is sent as that name, and is the client's own there. Anything else
goes back by value, and changes no object of the client: changes of classes in a call stay on its worker.

cloudpickle gives every class an id, and reduces it to ``(make, arguments, state, None, None, set_state)`` with the id
as the last argument but one. This module and :mod:`skyward.wire.code.class_parts` alone rely on that.
"""

from __future__ import annotations

import enum
import functools
import importlib
import itertools
import sys
import uuid
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass
from operator import mul
from pickle import PicklingError
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import cloudpickle.cloudpickle as _cloudpickle

from skyward.errors import SerializationError
from skyward.wire.code.class_parts import as_said, is_code, stamps_of
from skyward.wire.code.mains import MainNames, define_in_main, receiving

__all__ = [
    "Definition",
    "by_value",
    "found_under_its_name",
    "goes_by_value",
    "process_id",
    "received_as",
    "reduced_compiled",
    "reduced_context_variable",
    "reduced_for_call",
    "reduced_for_result",
    "reduced_to_name",
]

Definition = type[Any] | FunctionType | ModuleType
Reduced = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Origin of an object that was received by value.

    Attributes:
        process: identity of the process that sent it.
        module: name of its module there; empty if it is not found under its name there.
        name: its qualified name in that module; empty if it is the module itself.
        class_id: cloudpickle's id if it is a class, else empty.
        of_client: whether it came with a call of the client, and so may go back as a name.
    """

    process: str
    module: str
    name: str
    class_id: str
    of_client: bool


_make_skeleton: Final = cast("Any", _cloudpickle)._make_skeleton_class  # noqa: SLF001 - it has no public way
_HEAP_TYPE = 1 << 9
# Weakly: a worker must not keep every class that ever came with a call.
_origins: WeakKeyDictionary[Any, _Origin] = WeakKeyDictionary()
_received: WeakValueDictionary[tuple[str, str, str], Any] = WeakValueDictionary()
_unfinished: WeakSet[type] = WeakSet()  # classes whose state is still to come
# Attributes of received classes as last received, each with its sender's stamp.
_attributes: WeakKeyDictionary[type, dict[str, tuple[int, Any]]] = WeakKeyDictionary()
# What calls leave on classes lasts from call to call, though nothing else may refer to them in between.
_kept: OrderedDict[type, None] = OrderedDict()
_MOST_KEPT = 256


def found_under_its_name(value: type | BuiltinFunctionType | FunctionType) -> bool:
    """Return True if its module has ``value`` under its name."""
    # Compared by identity, as wrappers take over the names of the wrapped functions.
    if "<locals>" in value.__qualname__:  # a function's own names cannot be looked up
        return False
    try:
        module = sys.modules[value.__module__ or "builtins"]
        return functools.reduce(getattr, value.__qualname__.split("."), cast("Any", module)) is value
    except Exception:  # a module may do anything when it is asked for an attribute
        return False


def by_value(pickler: Any, value: Definition) -> Any:
    """Return cloudpickle's reduction of ``value`` to its definition, although it is found under its name here."""
    # cloudpickle's own way is a registry of modules, which belongs to the user.
    match value:
        case ModuleType():
            names = {name: each for name, each in vars(value).items() if name != "__builtins__"}
            return _cloudpickle.dynamic_subimport, (value.__name__, names)
        case type() if value.__flags__ & _HEAP_TYPE:
            return cast("Any", _cloudpickle)._dynamic_class_reduce(value)  # noqa: SLF001 - as above
        case FunctionType():
            return pickler._dynamic_function_reduce(value)  # noqa: SLF001 - as above
        case _:  # a class of a compiled module
            return NotImplemented


def reduced_compiled(cls: type) -> Reduced | None:
    """Return a reduction of a class that no ``class`` statement has made; None for all others.

    Raises:
        PicklingError: there is no name for it, or for its metaclass.
    """
    # cloudpickle takes a class that it does not find under its name for one whose definition it can send.
    if _is_compiled(cls):
        module = sys.modules.get(cls.__module__)
        named = next((name for name, value in vars(module).items() if value is cls), None) if module else None
        if named is None:
            raise PicklingError(f"its module {cls.__module__} does not have the compiled class {cls.__qualname__}")
        return getattr, (module, named)
    if _is_compiled(type(cls)) and not found_under_its_name(type(cls)):
        if type(cls).__name__ == "PyCArrayType":
            return mul, (cls._type_, cls._length_)  # type: ignore[attr-defined] - the public attributes of ctypes' arrays
        raise PicklingError(
            f"classes with the compiled metaclass {type(cls).__qualname__} go by name only: define it in a module of "
            "your project, which is imported where the call runs"
        )
    return None


def _is_compiled(cls: type) -> bool:
    compiled = (MethodDescriptorType, WrapperDescriptorType)
    return any(isinstance(value, compiled) and value.__objclass__ is cls for value in vars(cls).values())


_variables: dict[str, ContextVar[Any]] = {}  # for good, as the interpreter keeps them
_ids_of_variables: dict[ContextVar[Any], str] = {}
_numbers: Final = itertools.count()


def reduced_context_variable(variable: ContextVar[Any]) -> Reduced:
    """Return a reduction by which each process has one variable for it, with its default and without its value."""
    variable_id = _ids_of_variables.setdefault(variable, f"{process_id()}-{next(_numbers)}")
    _variables[variable_id] = variable
    options: dict[str, Any] = {}
    with suppress(LookupError):  # it has no default
        options["default"] = Context().run(variable.get)
    return _context_variable, (variable_id, variable.name, options)


def _context_variable(variable_id: str, name: str, options: dict[str, Any]) -> ContextVar[Any]:
    if (variable := _variables.get(variable_id)) is None:
        made: ContextVar[Any] = ContextVar(name, **options)
        variable = _variables.setdefault(variable_id, made)
        _ids_of_variables[variable] = variable_id
    return variable


def goes_by_value(value: Definition, reduced: Any) -> bool:
    """Return True if cloudpickle reduced ``value`` to its definition, not to a name."""
    match value:
        case ModuleType():
            return len(reduced[1]) > len(("name",))
        case _:
            return reduced is not NotImplemented and len(reduced) > len(("make", "arguments", "state", "", ""))


def reduced_for_call(value: Definition, reduced: Reduced, mains: dict[int, MainNames]) -> Reduced:
    """Return a reduction that keeps the identity of a definition on its way to a worker.

    Args:
        value: definition that travels by value.
        reduced: cloudpickle's reduction of it.
        mains: the names that functions of ``__main__`` in this pickle share, by the id of cloudpickle's.
    """
    module, name = _name_of(value)
    match value:
        case type():
            make, arguments, state, *_, set_state = as_said(value, reduced)
            maker = _make_called_class, (process_id(), module, name, make, *arguments)
            sent = process_id(), set_state, state, stamps_of(value, state[0])
            return (*maker, sent, None, None, _update_called_class)
        case ModuleType():
            return _make_module, (process_id(), module, value.__name__), reduced[1][1], None, None, _fill_module
        case _:
            make, (code, names, *others), *rest = reduced
            if names.get("__name__") == "__main__":  # of its globals: a wrapper takes over `__module__`
                names = mains.setdefault(id(names), MainNames(names))
            if module:
                return (_make_function, (process_id(), module, name, make, code, names, *others), *rest)
            return (make, (code, names, *others), *rest)


def received_as(value: FunctionType, reduced: Reduced, *, is_result: bool) -> Reduced:
    """Return a reduction of a function by any maker, which keeps the identity of the function in a call."""
    module, name = ("", "") if is_result else _name_of(value)
    return (
        (_make_function, (process_id(), module, name, reduced[0], *reduced[1])) if module else reduced[:2]
    ) + reduced[2:]


def reduced_for_result(value: Definition, reduced: Reduced) -> Reduced:
    """Return a reduction that changes no existing object at the receiver of a result."""
    match value:
        case type():
            make, arguments, state, *_, set_state = as_said(value, reduced)
            return _make_class, (make, *arguments), (set_state, state), None, None, _complete_class
        case ModuleType():
            return _make_module, ("", "", value.__name__), reduced[1][1], None, None, _fill_module
        case _:
            return reduced


def reduced_to_name(value: Definition) -> Reduced | None:
    """Return the reduction to the client's name for ``value``; None if it did not come from the client."""
    origin = _origins.get(value)
    if origin is None or not origin.of_client or not origin.module:
        return None
    return _at_home, (origin.process, origin.module, origin.name, origin.class_id)


@functools.cache
def process_id() -> str:
    """Return the identity of this process, for objects that it sends."""
    return uuid.uuid4().hex


def _name_of(value: Definition) -> tuple[str, str]:
    """Return module and qualified name under which this process finds ``value``; empty if it does not."""
    if isinstance(value, ModuleType):
        return (value.__name__ if sys.modules.get(value.__name__) is value else "", "")
    return (value.__module__, value.__qualname__) if found_under_its_name(value) else ("", "")


def _class_of(class_id: str) -> type | None:
    return cast("Any", _cloudpickle)._DYNAMIC_CLASS_TRACKER_BY_ID.get(class_id)  # noqa: SLF001 - it has no public way


def _remember(value: Any, process: str, module: str, name: str, class_id: str = "") -> None:
    of_client = receiving.active
    _origins[value] = _Origin(process=process, module=module, name=name, class_id=class_id, of_client=of_client)
    if module:
        _received[process, module, name] = value
    if module == "__main__" and name:
        define_in_main(name, value)


def _make_called_class(process: str, module: str, name: str, make: Callable[..., type], *arguments: Any) -> type:
    cls, origin = _class_of(arguments[-2]), None
    if cls is None:
        cls = _made(make, arguments)
        if name:
            cls.__qualname__ = name  # cloudpickle leaves out the classes around it
        _unfinished.add(cls)
    elif (origin := _origins.get(cls)) is None or origin.process != process:
        return cls  # this process's own, or another one's
    _remember(cls, process, module, name, arguments[-2])
    _keep(cls)
    return cls


def _keep(cls: type) -> None:
    _kept[cls] = None
    _kept.move_to_end(cls)
    if len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)


def _update_called_class(
    cls: type, sent: tuple[str, Callable[[type, Any], object], tuple[dict[str, Any], Any], dict[str, int]]
) -> None:
    """Give a class the attributes that have changed where it comes from; others stay as calls left them."""
    process, set_state, (names, members), stamps = sent
    origin = _origins.get(cls)
    if origin is None or origin.process != process or (process == process_id() and cls not in _unfinished):
        return
    last = _attributes.setdefault(cls, {})
    for gone in last.keys() - names.keys():
        del last[gone]
        with suppress(AttributeError, TypeError):  # deleted in the call, or made by the metaclass
            delattr(cls, gone)
    changed = {name: value for name, value in names.items() if _is_due(cls, name, value, stamps[name])}
    set_state(cls, (changed, {}))
    last.update((name, (stamps[name], vars(cls).get(name))) for name in changed)
    _complete_members(cls, members)


def _is_due(cls: type, name: str, value: object, stamp: int) -> bool:
    """Return True if an attribute that has arrived replaces the present one."""
    known = _attributes[cls].get(name)
    if known is None or known[0] != stamp or name == "_abc_impl":
        return True
    # Functions come with the present values of globals and closures, unless a call has put something in their place.
    return is_code(value) and vars(cls).get(name) is known[1]


def _complete_members(cls: type, attributes: dict[str, dict[str, Any]]) -> None:
    if cls in _unfinished and issubclass(cls, enum.Enum):
        for name, own in attributes.items():
            vars(cls.__members__[name]).update(own)
    _unfinished.discard(cls)


def _make_class(make: Callable[..., type], *arguments: Any) -> type:
    cls = _class_of(arguments[-2])
    if cls is None:
        cls = _made(make, arguments)
        _unfinished.add(cls)
    return cls


def _made(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Return a new class; ``__init_subclass__`` of a base that was sent too does not run again.

    It ran where the class comes from, and its effects on the class and on the base are part of what is sent. Its
    arguments are not known here.
    """
    if make is not _make_skeleton:
        return make(*arguments)
    _, _, bases, *_ = arguments
    sent = cast("Any", _cloudpickle)._DYNAMIC_CLASS_TRACKER_BY_CLASS  # noqa: SLF001 - it has no public way
    above = {
        each: None for base in bases for each in getattr(base, "__mro__", ()) if each in sent and _HOOK in vars(each)
    }
    with ExitStack() as stack:
        for base in above:
            stack.enter_context(_without_hook(base))
        return make(*arguments)


_HOOK: Final = "__init_subclass__"


@contextmanager
def _without_hook(base: type) -> Generator[None]:
    hook = vars(base)[_HOOK]
    setattr(base, _HOOK, classmethod(_do_nothing))
    try:
        yield
    finally:
        setattr(base, _HOOK, hook)


def _do_nothing(_: type, **__: object) -> None: ...


def _complete_class(cls: type, sent: tuple[Callable[[type, Any], object], Any]) -> None:
    if cls in _unfinished:
        set_state, (names, members) = sent
        set_state(cls, (names, {}))
        _complete_members(cls, members)


def _make_function(process: str, module: str, name: str, make: Callable[..., FunctionType], *arguments: Any) -> Any:
    function = make(*arguments)
    _remember(function, process, module, name)
    return function


def _make_module(process: str, module: str, name: str) -> ModuleType:
    made = ModuleType(name)
    if module:
        _remember(made, process, module, "")
    return made


def _fill_module(module: ModuleType, names: dict[str, Any]) -> None:
    vars(module).update(names)


def _at_home(process: str, module: str, name: str, class_id: str) -> Any:
    found = _class_of(class_id)
    if found is None and process != process_id():
        found = _received.get((process, module, name))
    if found is not None:
        return found
    try:
        outer = sys.modules.get(module) or importlib.import_module(module)
        return functools.reduce(getattr, name.split("."), cast("Any", outer)) if name else outer
    except (ImportError, AttributeError) as error:
        raise SerializationError(
            f"the result refers to {module}.{name}, which went with the call but is not here any more ({error}): "
            "keep it until the result is there"
        ) from error
