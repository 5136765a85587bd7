"""Definitions that travel by value: those of ``__main__``, of notebooks and closures, and of modules made by hand.

A call brings definitions to its worker, whose copies follow changes that are made where they come from. On the way
back, an object that came with a call under a name is sent as that name, and is the client's own there. Anything else
goes back by value, and changes no object of the client: changes of classes in a call stay on its worker.
"""

from __future__ import annotations

import abc
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
import types
import typing
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from operator import mul
from pickle import PicklingError
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle
import cloudpickle.cloudpickle as _cloudpickle

from skyward.errors import SerializationError
from skyward.shipping.received_modules import received_source

Definition = type[Any] | FunctionType | ModuleType
Reduced = tuple[Any, ...]

# cloudpickle's ids of classes: by them, a task of Dask's gets the classes that calls get. It has no public way to them.
_cloudpickles: Final = cast("Any", _cloudpickle)
_id_of_class: Final = _cloudpickles._get_or_create_tracker_id  # noqa: SLF001
_register_class: Final = _cloudpickles._lookup_class_or_track  # noqa: SLF001
_classes: Final[Mapping[str, type]] = _cloudpickles._DYNAMIC_CLASS_TRACKER_BY_ID  # noqa: SLF001
_ids_of_classes: Final[Mapping[type, str]] = _cloudpickles._DYNAMIC_CLASS_TRACKER_BY_CLASS  # noqa: SLF001

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
        classes = [cls for cls in list(_ids_of_classes) if cls.__module__ == MAIN and cls.__qualname__ == name]
        if not classes:
            raise AttributeError(f"module {MAIN!r} has no attribute {name!r}", name=name, obj=self)
        return classes[-1]


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


def annotated_names(value: type | FunctionType) -> dict[str, Any]:
    """Return what the annotations of a definition of ``__main__`` name as text, for type hints."""
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


def _define_missing(names: Mapping[str, Any]) -> None:
    for name, value in names.items():
        if receiving.active and name not in vars(_main()):
            define_in_main(name, value)


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


# --- classes ----------------------------------------------------------------------------------------------------------
# A class is copied as it is, its own attributes in their order. Neither its metaclass nor an ``__init_subclass__`` that
# came with it runs again: they ran where it comes from, and what they did to it is sent. cloudpickle's own way leaves
# out ``__slots__``, what a base says too, and aliases, composites and attributes of the members of enums.

_STATED: Final = ("__module__", "__orig_bases__", "__slots__", "__firstlineno__")
"""Attributes that a class has from the start, and that never change."""
_HOOK: Final = "__init_subclass__"
_HEAP_TYPE: Final = 1 << 9
_ENUMS_OWN: Final = frozenset({"_member_map_", "_member_names_", "_member_type_", "_value2member_map_"})
_MEMBERS_OWN: Final = frozenset({"__objclass__", "_inverted_", "_name_", "_sort_order_", "_value_"})


def own_attributes(cls: type[Any]) -> dict[str, Any]:
    """Return what a class itself says, without what Python makes for every class."""
    hidden = {*_STATED, "__annotate_func__"}
    if issubclass(cls, enum.Enum):
        hidden |= _ENUMS_OWN | cls.__members__.keys()
    own = {name: value for name, value in vars(cls).items() if name not in hidden and not _is_slot_of(cls, value)}
    if "_abc_impl" in own:  # caches besides the registered classes
        references = cast("Any", abc)._get_dump(cls)[0]  # noqa: SLF001 - as cloudpickle does
        own["_abc_impl"] = [registered for reference in references if (registered := reference()) is not None]
    return own


def _is_slot_of(cls: type, value: object) -> bool:
    return isinstance(value, GetSetDescriptorType | MemberDescriptorType) and value.__objclass__ is cls


def reduced_class(cls: type[Any], own: Mapping[str, Any], *, is_result: bool) -> Reduced:
    """Return the reduction of a class to its definition.

    Args:
        cls: the class.
        own: its attributes, as they are sent.
        is_result: True if it goes to the client, where it changes no class that exists.
    """
    origin = _named_origin(cls, is_result=is_result)
    stated = {name: vars(cls)[name] for name in _STATED if name in vars(cls)} | {"__qualname__": cls.__qualname__}
    class_id = _id_of_class(cls)
    members, attributes = (_enum_parts(cls), _attributes_of_members(cls)) if issubclass(cls, enum.Enum) else (None, {})
    states = {} if is_result else {name: _state_of_attribute(value) for name, value in own.items()}
    hints = {} if is_result or cls.__module__ != MAIN else annotated_names(cls)
    make = type(cls), cls.__name__, cls.__bases__, stated, members
    return (
        _make_class,
        (origin, class_id, *make),
        (origin[0], own, states, attributes, hints),
        None,
        None,
        _update_class,
    )


def _make_class(  # noqa: PLR0917 - arguments of a reduction
    origin: tuple[str, str, str],
    class_id: str,
    metaclass: Any,
    name: str,
    bases: tuple[type, ...],
    stated: dict[str, Any],
    members: _Members | None,
) -> type:
    """Return the class with this id; make it if there is none. The origin of a result's is empty."""
    cls, process = _classes.get(class_id), origin[0]
    if cls is None:
        with _without_hooks(bases):
            make = _new_class if members is None else functools.partial(_new_enum, members)
            cls = _register_class(class_id, make(metaclass, name, bases, stated))
        _attributes[cls] = {}
    elif not process or (known := _origins.get(cls)) is None or known.process != process:
        return cls  # this process's own, or another one's
    if process:
        _remember(cls, *origin, class_id)
        _keep_alive(cls)
    return cls


def _new_class(metaclass: Any, name: str, bases: tuple[type, ...], stated: dict[str, Any]) -> type:
    """Make a class by that part of its metaclass that is not written in Python."""
    makers = (base for base in metaclass.__mro__ if base is abc.ABCMeta or "__new__" in vars(base))
    maker = next(base for base in makers if base is abc.ABCMeta or not isinstance(base.__new__, FunctionType))
    return maker.__new__(metaclass, name, bases, stated)


@contextmanager
def _without_hooks(bases: tuple[type, ...]) -> Generator[None]:
    """Switch off the ``__init_subclass__`` of classes that were sent."""
    above = {cls: vars(cls).get(_HOOK) for base in bases for cls in base.__mro__ if cls in _ids_of_classes}
    hooks = {cls: hook for cls, hook in above.items() if hook is not None}
    for cls in hooks:
        setattr(cls, _HOOK, classmethod(_do_nothing))
    try:
        yield
    finally:
        for cls, hook in hooks.items():
            setattr(cls, _HOOK, hook)


def _do_nothing(_: type, **__: object) -> None: ...


# Attributes of received classes as last received, each with its state at its origin.
_attributes: WeakKeyDictionary[type, dict[str, tuple[object, Any]]] = WeakKeyDictionary()


@functools.lru_cache(maxsize=256)
def _keep_alive(cls: type) -> type:
    """Keep the latest classes: what calls leave on them lasts, though nothing else may refer to them in between."""
    return cls


def _update_class(
    cls: type, sent: tuple[str, dict[str, Any], dict[str, object], dict[str, Any], dict[str, Any]]
) -> None:
    """Give a class the attributes that have changed where it comes from; others stay as calls left them."""
    process, own, states, members, hints = sent
    _define_missing(hints)
    last, origin = _attributes.get(cls), _origins.get(cls)
    if last is None or (last and (origin is None or origin.process != process)):
        return
    for name, attributes in members.items() if not last else ():
        vars(cast("Any", cls).__members__[name]).update(attributes)
    for removed in last.keys() - own.keys():
        del last[removed]
        with suppress(AttributeError, TypeError):  # deleted in the call, or made by the metaclass
            delattr(cls, removed)
    for registered in own.pop("_abc_impl", ()):
        cast("Any", cls).register(registered)
    for name, value in own.items():
        if _is_due(cls, name, value, states.get(name)):
            setattr(cls, name, value)
            last[name] = states.get(name), vars(cls).get(name)


def _is_due(cls: type, name: str, value: object, state: object) -> bool:
    """Return True if an attribute that has arrived replaces the present one."""
    known = _attributes[cls].get(name)
    if known is None or known[0] != state:
        return True
    # Functions come with the present values of globals and closures, unless a call has put something in their place.
    return _is_code(value) and vars(cls).get(name) is known[1]


def _is_code(value: object) -> bool:
    return isinstance(value, FunctionType | type) or hasattr(type(value), "__get__")


def _state_of_attribute(value: Any) -> object:
    """Return what tells one state of an attribute from another: its identity, and its content if that may change."""
    if _is_code(value):
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


# Boundary and data type of an enum; by the name of each member the arguments for the data type, and its value.
_Members = tuple[Any, Any, dict[str, tuple[tuple[Any, ...], Any]]]


def _enum_parts(cls: type[enum.Enum]) -> _Members:
    mixin = cast("Any", cls)._member_type_
    members = {name: (_payload(member, mixin), member._value_) for name, member in cls.__members__.items()}
    return vars(cls).get("_boundary_"), mixin, members


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


def _attributes_of_members(cls: type[enum.Enum]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in vars(member).items() if key not in _MEMBERS_OWN}
        for name, member in cls.__members__.items()
    }


def _no_init(*_: object) -> None:
    """Leave a member as it is: its attributes come with the class's."""


def _new_enum(parts: _Members, metaclass: Any, name: str, bases: tuple[type, ...], stated: dict[str, Any]) -> type:
    boundary, mixin, members = parts

    def __new__(cls: Any, member_data: Any) -> Any:  # noqa: N807
        member = mixin.__new__(cls, *member_data.payload)
        member._value_ = member_data.value
        return member

    options = {} if boundary is None else {"boundary": boundary}
    body = metaclass.__prepare__(name, bases, **options)
    names: dict[str, Any] = stated | {"__new__": __new__, "__init__": _no_init}
    for key, value in names.items():  # one by one: it watches them
        body[key] = value
    for key, (payload, value) in members.items():
        body[key] = SimpleNamespace(payload=payload, value=value)
    cls = metaclass.__new__(metaclass, name, bases, body, **options)
    for made in ("__init__", "__new_member__"):
        if made in vars(cls):
            delattr(cls, made)
    return cls


# --- identity of classes, functions and modules -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
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


# Weakly: a worker must not keep every class that ever came with a call.
_origins: WeakKeyDictionary[Any, _Origin] = WeakKeyDictionary()
_received: WeakValueDictionary[tuple[str, str, str], Any] = WeakValueDictionary()


def found_under_its_name(value: type | BuiltinFunctionType | FunctionType) -> bool:
    """Return True if its module has ``value`` under its name."""
    # Compared by identity, as wrappers take over the names of the wrapped functions.
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")  # objects of typing have no other
    if not name or "<locals>" in name:  # a function's own names cannot be looked up
        return False
    return find_by_name(value.__module__ or "builtins", name) is value


def find_by_name(module: str, name: str) -> Any:
    """Return what a loaded module has under a qualified name; :data:`_ABSENT` if it has nothing."""
    try:
        return functools.reduce(getattr, name.split("."), cast("Any", sys.modules[module]))
    except Exception:  # a module may do anything when it is asked for an attribute
        return _ABSENT


_ABSENT: Final = object()


def reduced_compiled(cls: type) -> Reduced | None:
    """Return a reduction of a class that no ``class`` statement has made; None for all others.

    Raises:
        PicklingError: there is no name for it, or for its metaclass.
    """
    if (name := _NAMES_IN_TYPES.get(id(cls))) is not None:
        return _of_types, (name,)
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


# Those of functions, code and None, which no module has under their own names.
_NAMES_IN_TYPES: Final = {id(value): name for name, value in vars(types).items() if isinstance(value, type)}


def _of_types(name: str) -> Any:
    return getattr(types, name)


def _is_compiled(cls: type) -> bool:
    compiled = (MethodDescriptorType, WrapperDescriptorType)
    return not cls.__flags__ & _HEAP_TYPE or any(
        isinstance(value, compiled) and value.__objclass__ is cls for value in vars(cls).values()
    )


def reduced_module(module: ModuleType, names: Mapping[str, Any], *, is_result: bool) -> Reduced:
    """Return the reduction of a module to the names in it."""
    return _make_module, (_named_origin(module, is_result=is_result), module.__name__), names, None, None, _fill_module


def reduced_with_origin(function: FunctionType, reduced: Reduced) -> Reduced:
    """Return a reduction of a function on its way to a worker that keeps its identity."""
    origin = _named_origin(function, is_result=False)
    return (_make_function, (origin, reduced[0], *reduced[1]), *reduced[2:]) if origin[1] else reduced


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


def _named_origin(value: Definition, *, is_result: bool) -> tuple[str, str, str]:
    """Return this process, and module and qualified name under which it finds ``value``; empty if it does not.

    A result has no origin: it changes nothing that exists at the client.
    """
    if is_result:
        return "", "", ""
    if isinstance(value, ModuleType):
        return process_id(), value.__name__ if sys.modules.get(value.__name__) is value else "", ""
    return (
        (process_id(), value.__module__, value.__qualname__) if found_under_its_name(value) else (process_id(), "", "")
    )


def _remember(value: Any, process: str, module: str, name: str, class_id: str = "") -> None:
    _origins[value] = _Origin(process, module, name, class_id, receiving.active)
    if module:
        _received[process, module, name] = value
    if module == MAIN and name:
        define_in_main(name, value)


def _make_function(origin: tuple[str, str, str], make: Callable[..., FunctionType], *arguments: Any) -> Any:
    function = make(*arguments)
    _remember(function, *origin)
    return function


def _make_module(origin: tuple[str, str, str], name: str) -> ModuleType:
    module = ModuleType(name)
    if origin[1]:
        _remember(module, *origin)
    return module


def _fill_module(module: ModuleType, names: dict[str, Any]) -> None:
    vars(module).update(names)


def _at_home(process: str, module: str, name: str, class_id: str) -> Any:
    value = _classes.get(class_id)
    if value is None and process != process_id():
        value = _received.get((process, module, name))
    if value is not None:
        return value
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
    if value is dataclasses.MISSING or value is dataclasses.KW_ONLY:
        return getattr, (dataclasses, "MISSING" if value is dataclasses.MISSING else "KW_ONLY")
    if issubclass(kind, enum.Enum):
        return _reduced_member(value)
    if issubclass(kind, functools.cached_property):
        return _cached_property, (kind, vars(value) | ({"lock": None} if "lock" in vars(value) else {}))
    if kind is ContextVar:
        return _single, (_key_of(value), "", "", _remade, _parts_of_variable(cast("ContextVar[Any]", value)))
    if kind is object:
        name = _name_in_main(value)
        return _named(value, "__main__", name, object, ()) if name or id(value) in _keys else None
    if kind in _TYPING or kind.__name__ == "TypeAliasType":
        parts = _parts_of_typing(value)
        return None if by_name(value) else _named(value, _module_of(value), parts[1][0], _remade, parts)
    return _reduced_sentinel(value, by_name)


_TYPING: Final = frozenset({typing.NewType, typing.ParamSpec, typing.TypeVarTuple})


def _named(value: object, module: str, name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Reduced:
    if not name and module == "__main__":
        name = _name_in_main(value)
    if id(value) not in _keys and (not name or find_by_name(module, name) is not value):
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


def _module_of(value: object) -> str:
    return getattr(value, "__module__", None) or "__main__"


def _name_in_main(value: object) -> str:
    names = list(vars(sys.modules["__main__"]).items())
    return next((name for name, named in names if named is value), "")


_Parts = tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]
"""What makes an object, its positional arguments and keywords, and the attributes that it gets then."""


def _parts_of_variable(variable: ContextVar[Any]) -> _Parts:
    """Each process has one variable for it, with its default and without its value."""
    options: dict[str, Any] = {}
    with suppress(LookupError):  # it has no default
        options["default"] = Context().run(variable.get)
    return ContextVar, (variable.name,), options, {}


def _parts_of_typing(value: Any) -> _Parts:
    kind, own = cast("type[Any]", type(value)), {"__module__": value.__module__}
    if kind is typing.NewType:
        return kind, (value.__name__, value.__supertype__), {}, own | {"__qualname__": value.__qualname__}
    if kind is typing.TypeVarTuple:
        return kind, (value.__name__,), {}, own
    if kind is typing.ParamSpec:
        options = {name: getattr(value, f"__{name}__") for name in ("bound", "covariant", "contravariant")}
        return kind, (value.__name__,), options, own
    return kind, (value.__name__, value.__value__), {"type_params": value.__type_params__}, {}


def _remade(make: Any, arguments: tuple[Any, ...], options: dict[str, Any], attributes: dict[str, Any]) -> Any:
    copy = make(*arguments, **options)
    for name, value in attributes.items():
        setattr(copy, name, value)
    return copy


def _reduced_member(member: Any) -> Reduced | None:
    """Return the reduction of an enum's member by its name, or of a composite that has none by its value."""
    cls = cast("type[Any]", type(member))
    own = next(vars(base)["__reduce_ex__"] for base in cls.__mro__ if "__reduce_ex__" in vars(base))
    if getattr(own, "__module__", None) not in ("enum", None):
        return None  # its author's way
    name = getattr(member, "_name_", None)
    if name in cls.__members__ and cls.__members__[name] is member:
        return _member, (cls, name)
    return cls, (member._value_,)


def _member(cls: type[enum.Enum], name: str) -> enum.Enum:
    return cls.__members__[name]


def _cached_property(cls: Any, names: dict[str, Any]) -> Any:
    copy: Any = object.__new__(cls)
    vars(copy).update(names)
    if "lock" in names:  # until Python 3.12
        copy.lock = threading.RLock()
    return copy


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
    slots = (name for base in type(value).__mro__ for name in vars(base).get("__slots__", ()))
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _bare(cls: Any, state: Mapping[str, Any]) -> Any:
    copy: Any = cls.__new__(cls)
    _set_state(copy, state)
    return copy


def _set_state(value: Any, state: Mapping[str, Any]) -> None:
    for name, attribute in state.items():
        object.__setattr__(value, name, attribute)


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
