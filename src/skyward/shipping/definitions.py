"""Definitions that travel by value: those of ``__main__``, of notebooks and closures, and of modules made by hand.

A call brings definitions to its worker, whose copies follow changes that are made where they come from. On the way
back, an object that came with a call under a name is sent as that name, and is the client's own there. Anything else
goes back by value, and changes no object of the client: changes of classes in a call stay on its worker.

This module alone relies on the form of cloudpickle's reductions. It gives every class an id, and reduces it to ``(make,
arguments, state, None, None, set_state)`` with the id as the last argument but one.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import hashlib
import importlib
import itertools
import pickle
import re
import sys
import threading
import typing
import uuid
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from operator import mul
from pickle import PicklingError
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import cloudpickle
import cloudpickle.cloudpickle as _cloudpickle

from skyward.errors import SerializationError
from skyward.shipping.received import received_source

Definition = type[Any] | FunctionType | ModuleType
Reduced = tuple[Any, ...]

# --- __main__ of the client, on a worker ------------------------------------------------------------------------------
# Functions of one pickle share the names of one module, which is sys.modules["__main__"] while a call of theirs runs:
# pickles, type hints and sys.modules[__name__] find the classes that the call uses. Each pickle has its own module, so
# that a later one changes no names of a call that still runs.

MAIN = "__main__"


class MainNames:
    """Names of ``__main__`` in one pickle; it is rebuilt as the dictionary of a module.

    Args:
        names: the names that all functions have, such as ``__file__``.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def __reduce__(self) -> tuple[Any, ...]:
        return _names_of_main, (self._names,)


class _MainLoader(InspectLoader):
    """Loader of a received ``__main__``, by which its source is found; holds the module for its functions.

    Attributes:
        module: the module.
        defined: the definitions that were received for it, by name.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.defined: dict[str, Any] = {}

    def get_source(self, fullname: str) -> str:
        """See :class:`importlib.abc.InspectLoader`."""
        if (source := received_source(fullname)) is None:
            raise ImportError(f"the source of {fullname} was not sent", name=fullname)
        return source.text

    def get_code(self, fullname: str) -> CodeType:
        """Raise: it ran where it comes from."""
        raise ImportError(f"{fullname} runs where it comes from", name=fullname)


class _Main(ModuleType):
    """``__main__`` of the client, as far as it was received."""

    def __getattr__(self, name: str) -> type:
        """Return a class that came by another way, as with a task of Dask's; the newest of that name."""
        # Dask pickles with cloudpickle, whose record of classes is the only trace of where they were found.
        known = cast("Any", _cloudpickle)._DYNAMIC_CLASS_TRACKER_BY_CLASS  # noqa: SLF001 - it has no public way
        found = [each for each in list(known) if each.__module__ == MAIN and each.__qualname__ == name]
        if not found:
            raise AttributeError(f"module {MAIN!r} has no attribute {name!r}", name=name, obj=self)
        return found[-1]


class _Receiving(threading.local):
    """Gathering of the definitions of ``__main__`` that this thread unpickles.

    Attributes:
        active: whether it unpickles a part of a call: what it receives may go back to the client as a name.
        main: their module; None if there are none yet.
    """

    active: bool = False
    main: ModuleType | None = None


receiving: Final = _Receiving()
# A context manager for it would take two microseconds of every call.


def define_in_main(name: str, value: object) -> None:
    """Record a definition of ``__main__`` that is being received."""
    if receiving.active and "." not in name:
        module = _main()
        _loader_of(module).defined[name] = value
        setattr(module, name, value)


def main_of_tasks() -> None:
    """Have tasks find the client's classes, until a call brings its own main module."""
    sys.modules[MAIN] = _main()


def with_annotated(value: type | FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a reduction of a definition of ``__main__`` with what its annotations name as text, for type hints."""
    names = _annotated(value)
    if not names:
        return reduced
    make, arguments, state, items, pairs, set_state = reduced
    return make, arguments, (set_state, state, names), items, pairs, _set_with_names


def _annotated(value: type | FunctionType) -> dict[str, Any]:
    scope = value.__globals__ if isinstance(value, FunctionType) else vars(sys.modules[MAIN])
    stated: Mapping[str, object] = vars(value).get("__annotations__") or {} if isinstance(value, type) else {}
    if isinstance(value, FunctionType) and scope.get("__name__") == MAIN:
        stated = value.__annotations__
    words = {word for text in stated.values() for word in re.findall(r"[^\W\d]\w*", _text_of(text))}
    return {word: scope[word] for word in sorted(words & scope.keys()) if _is_for_hints(scope[word])}


def _text_of(annotation: object) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation)) if not isinstance(annotation, type) else ""


def _is_for_hints(value: object) -> bool:
    """Return True for the client's own classes and for what annotations are made of; packages may be missing here."""
    if isinstance(value, ModuleType):
        return value.__name__ in ("typing", "collections.abc")
    if isinstance(value, type):
        return value.__module__ == MAIN or value.__module__ in sys.stdlib_module_names
    return type(value).__module__ in ("typing", "types")


def _set_with_names(value: Any, sent: tuple[Any, Any, dict[str, Any]]) -> None:
    set_state, state, names = sent
    set_state(value, state)
    for name, each in names.items():
        if receiving.active and name not in vars(_main()):
            define_in_main(name, each)


def enter_main(of_function: ModuleType | None, of_arguments: ModuleType | None) -> None:
    """Make the module that a call's function comes from, or else its arguments, this process's ``__main__``.

    Classes in the arguments are found in it, too.
    """
    main = of_function or of_arguments
    if main is None:
        return
    if of_arguments is not None and main is not of_arguments:
        for name, value in _loader_of(of_arguments).defined.items():
            if isinstance(value, type) or not hasattr(main, name):
                setattr(main, name, value)
    sys.modules[MAIN] = main


def _loader_of(module: ModuleType) -> _MainLoader:
    return cast("_MainLoader", module.__loader__)


def _names_of_main(names: dict[str, Any]) -> dict[str, Any]:
    module = _main()
    vars(module).update(names)
    # The name keeps multiprocessing's children from running the client's script, if they find a file of its name.
    package = names.get("__package__")
    module.__spec__ = ModuleSpec(f"{package}.{MAIN}" if package else MAIN, _loader_of(module))
    return vars(module)


def _main() -> ModuleType:
    if receiving.active and receiving.main is not None:
        return receiving.main
    module = _Main(MAIN)
    module.__loader__ = _MainLoader(module)
    module.__spec__ = ModuleSpec(MAIN, module.__loader__)
    if receiving.active:
        receiving.main = module
    return module


# --- parts of classes -------------------------------------------------------------------------------------------------
# cloudpickle 3.1.3 leaves out what a base says too, which changes the method resolution of diamonds; it makes classes
# without their __slots__, and enums without aliases, composites and attributes of members.

_make_skeleton: Final = cast("Any", _cloudpickle)._make_skeleton_class  # noqa: SLF001 - it has no public way
_track: Final = cast("Any", _cloudpickle)._lookup_class_or_track  # noqa: SLF001 - as above
_MADE_ANEW: Final = frozenset({"__dict__", "__doc__", "__module__", "__slots__", "__weakref__"})
_ENUMS_OWN: Final = frozenset({"_member_map_", "_member_names_", "_member_type_", "_value2member_map_"})
_MEMBERS_OWN: Final = frozenset({"__objclass__", "_inverted_", "_name_", "_sort_order_", "_value_"})


def as_said(cls: type[Any], reduced: Reduced) -> Reduced:
    """Return cloudpickle's reduction of a class with all that the class says itself, in its order."""
    make, arguments, state, listed, items, set_state = reduced
    names = _own_names(cls, state[0])
    if issubclass(cls, enum.Enum):
        arguments = (cls.__bases__, cls.__name__, cls.__qualname__, *_enum_parts(cls), *arguments[-2:])
        return _make_enum, arguments, (names, _attributes_of_members(cls)), listed, items, set_state
    if (slots := vars(cls).get("__slots__")) is not None and make is _make_skeleton and not issubclass(cls, tuple):
        head, body, tail = arguments[:3], arguments[3], arguments[4:]  # a NamedTuple refuses slots
        arguments = (*head, body | {"__slots__": slots}, *tail)
    return make, arguments, (names, state[1]), listed, items, set_state


def _own_names(cls: type[Any], sent: Mapping[str, Any]) -> dict[str, Any]:
    bases = [vars(base) for base in cls.__bases__]
    hidden = set(_MADE_ANEW)
    if issubclass(cls, enum.Enum):
        hidden |= _ENUMS_OWN | cls.__members__.keys()
    own: dict[str, Any] = {}
    for name, value in vars(cls).items():
        copied = "".join(name)  # not interned, as cloudpickle's names: equal pickles for equal classes
        if name in sent and name not in hidden - _MADE_ANEW:
            own[copied] = sent[name]
        elif name not in hidden and name != "_abc_impl" and any(base.get(name, base) is value for base in bases):
            own[copied] = value
    return own | {name: value for name, value in sent.items() if name not in own and name not in hidden}


@dataclass(frozen=True, slots=True)
class _Given:
    """What a member of an enum is made from.

    Attributes:
        payload: arguments for the data type that the enum is mixed with.
        value: the member's value.
    """

    payload: tuple[Any, ...]
    value: Any


def _enum_parts(cls: type[enum.Enum]) -> tuple[Any, ...]:
    mixin = cast("Any", cls)._member_type_
    members = {name: (_payload(each, mixin), each._value_) for name, each in cls.__members__.items()}
    return cls.__module__, type(cls), vars(cls).get("_boundary_"), mixin, members


def _payload(member: Any, mixin: Any) -> tuple[Any, ...]:
    """Return the arguments with which the data type of an enum makes the data of a member."""
    if mixin is object:
        return ()
    if hasattr(mixin, "__getnewargs__"):
        return mixin.__getnewargs__(member)
    make, arguments, *_ = mixin.__reduce_ex__(member, 2)
    if make is cast("Any", copyreg).__newobj__:
        return arguments[1:]
    return arguments if make is type(member) else ()


def _make_enum(  # noqa: PLR0917 - arguments of a reduction
    bases: tuple[type, ...],
    name: str,
    qualified: str,
    module: str,
    metaclass: Any,
    boundary: Any,
    mixin: Any,
    members: Mapping[str, tuple[tuple[Any, ...], Any]],
    class_id: str,
    _: object,
) -> type:
    def __new__(cls: Any, given: _Given) -> Any:  # noqa: N807
        made = mixin.__new__(cls, *given.payload)
        made._value_ = given.value
        return made

    options = {} if boundary is None else {"boundary": boundary}
    body = metaclass.__prepare__(name, bases, **options)
    body["__module__"], body["__qualname__"] = module, qualified
    body["__new__"], body["__init__"] = __new__, _no_init
    for each, (payload, value) in members.items():
        body[each] = _Given(payload, value)
    made = metaclass.__new__(metaclass, name, bases, body, **options)
    for own in ("__init__", "__new_member__"):
        if own in vars(made):
            delattr(made, own)
    return _track(class_id, made)


def _no_init(*_: object) -> None:
    """Leave a member as it is: its attributes come with the class's."""


def _attributes_of_members(cls: type[enum.Enum]) -> dict[str, dict[str, Any]]:
    own = {
        name: {each: value for each, value in vars(member).items() if each not in _MEMBERS_OWN}
        for name, member in cls.__members__.items()
    }
    return {name: attributes for name, attributes in own.items() if attributes}


def is_code(value: object) -> bool:
    """Return True for a function or another part of a class that is no data."""
    return isinstance(value, FunctionType | type) or hasattr(type(value), "__get__")


# By class: of each attribute what tells its state, and the stamp of that state.
_stamped: WeakKeyDictionary[type, dict[str, tuple[object, int]]] = WeakKeyDictionary()
_stamps = itertools.count(1)


def stamps_of(cls: type, names: Mapping[str, Any]) -> dict[str, int]:
    """Return a number for each attribute of a class, which changes when the attribute has changed here."""
    known = _stamped.setdefault(cls, {})
    for name, value in names.items():
        state = _state_of_attribute(value)
        if name not in known or known[name][0] != state:
            known[name] = state, next(_stamps)
    return {name: known[name][1] for name in names}


_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


def _state_of_attribute(value: Any) -> object:
    """Return what tells one state of an attribute from another: its identity, and its content if that may change."""
    kind = cast("type[Any]", type(value))
    if kind in _PLAIN:
        return kind, value
    if is_code(value):
        return id(value)
    content = hashlib.blake2b(digest_size=16)

    def add(buffer: pickle.PickleBuffer) -> bool:
        content.update(buffer.raw())
        return False

    try:
        content.update(pickle.dumps(value, protocol=5, buffer_callback=cast("Callable[[Any], Any]", add)))
    except Exception:  # the user's classes may raise anything
        return id(value), tuple(map(id, cast("Any", value))) if isinstance(value, list | tuple | set | dict) else ()
    return content.digest()


# --- identity of classes, functions and modules -----------------------------------------------------------------------


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
    if not isinstance(value, FunctionType):
        return _reduced_definition(value, reduced, process=process_id(), module=module, name=name)
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
    if isinstance(value, FunctionType):
        return reduced
    return _reduced_definition(value, reduced, process="", module="", name="")


def _reduced_definition(value: type | ModuleType, reduced: Reduced, *, process: str, module: str, name: str) -> Reduced:
    if isinstance(value, ModuleType):
        return _make_module, (process, module, value.__name__), reduced[1][1], None, None, _fill_module
    make, arguments, state, *_, set_state = as_said(value, reduced)
    stamps = stamps_of(value, state[0]) if process else {}
    sent = process, set_state, state, stamps
    return _make_class, (process, module, name, make, *arguments), sent, None, None, _update_class


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


def _make_class(process: str, module: str, name: str, make: Callable[..., type], *arguments: Any) -> type:
    """Return the class with the id in ``arguments``; make it if there is none. Results state no ``process``."""
    cls = _class_of(arguments[-2])
    if cls is None:
        cls = _made(make, arguments)
        if name:
            cls.__qualname__ = name  # cloudpickle leaves out the classes around it
        _unfinished.add(cls)
    elif not process or (origin := _origins.get(cls)) is None or origin.process != process:
        return cls  # this process's own, or another one's
    if process:
        _remember(cls, process, module, name, arguments[-2])
        _keep(cls)
    return cls


def _keep(cls: type) -> None:
    _kept[cls] = None
    _kept.move_to_end(cls)
    if len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)


def _update_class(
    cls: type, sent: tuple[str, Callable[[type, Any], object], tuple[dict[str, Any], Any], dict[str, int]]
) -> None:
    """Give a class the attributes that have changed where it comes from; others stay as calls left them."""
    process, set_state, (names, members), stamps = sent
    origin = _origins.get(cls)
    follows = origin is not None and origin.process == process != process_id()
    if cls not in _unfinished and not follows:
        return
    last = _attributes.setdefault(cls, {})
    for gone in last.keys() - names.keys():
        del last[gone]
        with suppress(AttributeError, TypeError):  # deleted in the call, or made by the metaclass
            delattr(cls, gone)
    changed = {name: value for name, value in names.items() if _is_due(cls, name, value, stamps.get(name, 0))}
    set_state(cls, (changed, {}))
    last.update((name, (stamps.get(name, 0), vars(cls).get(name))) for name in changed)
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


# --- single objects: those that pickle by a name which a worker lacks, or need not fail to be pickled -----------------
# NewType, ParamSpec, TypeVarTuple and sentinels go with what they are made from. Those that are found under a name keep
# their identity, and context variables always do: every call of a process gets the same object, and a result refers to
# the client's own.

_ABSENT: Final = object()
_numbers: Final = itertools.count(1)
# Sent and received ones, by process and number there. Strongly: many of them allow no weak references, and there are as
# many as definitions in the programs of the clients.
_singles: dict[tuple[str, int], Any] = {}
_keys: dict[int, tuple[str, int]] = {}  # by id


def reduced_single(value: object, by_name: Callable[[Any], bool]) -> Reduced | None:
    """Return a reduction of ``value`` that needs no name on the other side; None if the usual one will do.

    Args:
        value: any object that is no class, function or module.
        by_name: returns True for an object that the other side finds under its name.
    """
    kind = cast("type[Any]", type(value))
    if kind in _DATACLASS_MARKS:
        return getattr, (dataclasses, _DATACLASS_MARKS[kind])
    if issubclass(kind, enum.Enum):
        return _reduced_member(value)
    if issubclass(kind, functools.cached_property):
        return _reduced_cached_property(value)
    if kind is ContextVar:
        return _reduced_context_variable(cast("ContextVar[Any]", value))
    if kind is object:
        name = _name_in_main(value)
        return _named(value, "__main__", name, object, ()) if name or id(value) in _keys else None
    if kind in _TYPING or kind.__name__ == "TypeAliasType":
        parts = _parts_of_typing(value)
        return None if by_name(value) else _named(value, _module_of(value), cast("Any", value).__name__, *parts)
    return _reduced_sentinel(value, by_name)


_TYPING: Final = frozenset({typing.NewType, typing.ParamSpec, typing.TypeVarTuple})
_DATACLASS_MARKS: Final[dict[type[Any], str]] = {
    type(dataclasses.MISSING): "MISSING",
    type(dataclasses.KW_ONLY): "KW_ONLY",
}


def _named(value: object, module: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Reduced:
    if not name and module == "__main__":
        name = _name_in_main(value)
    if id(value) not in _keys and (not name or _found(module, name) is not value):
        return make, arguments
    return _single, (_key_of(value), module, name, make, arguments)


def _key_of(value: object) -> tuple[str, int]:
    if (key := _keys.get(id(value))) is None:
        key = process_id(), next(_numbers)
        _singles[key], _keys[id(value)] = value, key
    return key


def _single(key: tuple[str, int], module: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    value = _singles.get(key, _ABSENT)
    if value is _ABSENT:
        value = _singles[key] = make(*arguments)
        _keys[id(value)] = key
    elif make is _bare and key[0] != process_id():
        _set_state(value, arguments[1])  # it may have changed there
    if module == "__main__" and name:
        define_in_main(name, value)
    return value


def _reduced_context_variable(variable: ContextVar[Any]) -> Reduced:
    """Return a reduction by which each process has one variable for it, with its default and without its value."""
    options: dict[str, Any] = {}
    with suppress(LookupError):  # it has no default
        options["default"] = Context().run(variable.get)
    return _single, (_key_of(variable), "", "", _context_variable, (variable.name, options))


def _context_variable(name: str, options: dict[str, Any]) -> ContextVar[Any]:
    return ContextVar(name, **options)


def _found(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), cast("Any", sys.modules[module]))
    except (AttributeError, KeyError):
        return _ABSENT


def _module_of(value: object) -> str:
    return getattr(value, "__module__", None) or "__main__"


def _name_in_main(value: object) -> str:
    names = list(vars(sys.modules["__main__"]).items())
    return next((name for name, each in names if each is value), "")


def _parts_of_typing(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the maker of an object of :mod:`typing` that pickles by name, and its arguments."""
    module = value.__module__
    kind = cast("type[Any]", type(value))
    if kind is typing.NewType:
        return _new_type, (value.__name__, value.__supertype__, module, value.__qualname__)
    if kind is typing.ParamSpec:
        options = {name: getattr(value, f"__{name}__") for name in ("bound", "covariant", "contravariant")}
        return _in_module, (kind, (value.__name__,), options, module)
    if kind is typing.TypeVarTuple:
        return _in_module, (kind, (value.__name__,), {}, module)
    options = {"type_params": value.__type_params__}
    return _in_module, (kind, (value.__name__, value.__value__), options, module)


def _new_type(name: str, supertype: Any, module: str, qualified: str) -> Any:
    made: Any = typing.NewType(name, supertype)  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
    made.__module__, made.__qualname__ = module, qualified
    return made


def _in_module(kind: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any], module: str) -> Any:
    made = kind(*arguments, **options)
    with suppress(AttributeError):
        made.__module__ = module
    return made


def _reduced_member(member: Any) -> Reduced | None:
    """Return the reduction of an enum's member by its name, or of a composite that has none by its value."""
    cls = cast("type[Any]", type(member))
    own = next(vars(each)["__reduce_ex__"] for each in cls.__mro__ if "__reduce_ex__" in vars(each))
    if getattr(own, "__module__", None) not in ("enum", None):
        return None  # its author's way
    name = getattr(member, "_name_", None)
    if name in cls.__members__ and cls.__members__[name] is member:
        return _member, (cls, name)
    return cls, (member._value_,)


def _member(cls: type[enum.Enum], name: str) -> enum.Enum:
    return cls.__members__[name]


def _reduced_cached_property(value: object) -> Reduced:
    names: dict[str, Any] = vars(value)
    return (
        _cached_property,
        (cast("type[Any]", type(value)),),
        ({name: each for name, each in names.items() if name != "lock"}, "lock" in names),
        None,
        None,
        _fill_cached_property,
    )


def _cached_property(cls: type[functools.cached_property[Any]]) -> functools.cached_property[Any]:
    return cls.__new__(cls)


def _fill_cached_property(made: functools.cached_property[Any], state: tuple[dict[str, Any], bool]) -> None:
    names, locked = state
    vars(made).update(names, **({"lock": threading.RLock()} if locked else {}))  # until Python 3.12


def _reduced_sentinel(value: Any, by_name: Callable[[Any], bool]) -> Reduced | None:
    """Return the reduction of an object whose class reduces it to a name; None for any other."""
    cls = cast("type[Any]", type(value))
    if cls in cloudpickle.Pickler.dispatch_table:
        return None
    own = cls.__reduce_ex__ if cls.__reduce_ex__ is not object.__reduce_ex__ else cls.__reduce__
    if not isinstance(own, FunctionType):
        return None
    reduced = value.__reduce_ex__(5)
    if not isinstance(reduced, str):
        return reduced
    return None if by_name(cls) else _named(value, _module_of(value), reduced, _bare, (cls, _state_of_single(value)))


def _state_of_single(value: Any) -> dict[str, Any]:
    slots = (name for each in type(value).__mro__ for name in vars(each).get("__slots__", ()))
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _bare(cls: Any, state: Mapping[str, Any]) -> Any:
    made: Any = cls.__new__(cls)
    _set_state(made, state)
    return made


def _set_state(made: Any, state: Mapping[str, Any]) -> None:
    for name, each in state.items():
        object.__setattr__(made, name, each)


def is_single_dispatch(function: FunctionType) -> bool:
    """Return True for a function that :func:`functools.singledispatch` has made."""
    return {"dispatch", "registry", "register", "_clear_cache", "__wrapped__"} <= vars(function).keys()


def reduced_dispatch(function: FunctionType) -> Reduced:
    """Return the reduction of a function that dispatches by type: its cache and its registry cannot be pickled."""
    parts = vars(function)
    registry = dict(parts["registry"])
    hidden = ("dispatch", "registry", "register", "_clear_cache", "__wrapped__")
    others = {name: value for name, value in parts.items() if name not in hidden}
    return functools.singledispatch, (parts["__wrapped__"],), (registry, others), None, None, _fill_dispatch


def _fill_dispatch(function: Any, state: tuple[dict[type, Any], dict[str, Any]]) -> None:
    registry, others = state
    for kind, implementation in registry.items():
        function.register(kind, implementation)
    vars(function).update(others)
