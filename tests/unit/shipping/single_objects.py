"""Program with objects that pickle by name or not at all; it prints the cases in which another process sees others."""

from __future__ import annotations

import abc
import collections
import contextvars
import dataclasses
import enum
import functools
import json
import pickle
import re
import struct
import subprocess
import sys
import time
import typing
import weakref
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, ParamSpec, Protocol, TypedDict, TypeVar

from typing_extensions import TypeAliasType, TypeVarTuple

from skyward.shipping.pickling import pack, unpack

UserId = NewType("UserId", int)
AdminId = NewType("AdminId", UserId)
T = TypeVar("T", bound=int)
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
NativeTs = typing.TypeVarTuple("NativeTs")
Pair = TypeAliasType("Pair", tuple[T, T], type_params=(T,))
PLAIN = object()
VARIABLE = contextvars.ContextVar("VARIABLE", default=7)
BARE_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("BARE_VARIABLE")
PATTERN = re.compile("a+")
STRUCT_TIME = time.gmtime(0)


class Missing:
    def __reduce__(self) -> str:
        return "MISSING"


class Undefined:
    __slots__ = ("label",)

    def __reduce_ex__(self, _: object) -> str:
        return "UNDEFINED"


MISSING = Missing()
UNDEFINED = Undefined()
UNDEFINED.label = "undefined"  # pyright: ignore[reportAttributeAccessIssue]


class Permission(enum.IntFlag):
    READ = 4
    WRITE = 2
    RUN = 1
    BOTH = 6
    ALL = 7
    NONE = 0
    ODD = 9


class Flags(enum.Flag):
    A = enum.auto()
    B = enum.auto()
    AB = A | B
    BIG = 0x30


class Kept(enum.Flag, boundary=enum.KEEP):
    A = 1


class Color(enum.Enum):
    RED = 1
    GREEN = 2
    CRIMSON = 1  # noqa: PIE796 - an alias

    @property
    def shown(self) -> str:
        return self.name.lower()

    @classmethod
    def _missing_(cls, value: object) -> Color:
        return cls.GREEN


class Planet(enum.Enum):
    EARTH = (5.9, 6.3)
    MARS = (6.4, 3.3)

    def __init__(self, mass: float, radius: float) -> None:
        self.mass, self.radius = mass, radius


class Coordinate(bytes, enum.Enum):
    X = (0, "at x")
    Y = (4, "at y")

    def __new__(cls, value: int, label: str) -> Any:
        made = bytes.__new__(cls, [value])
        made._value_ = value
        made.label = label  # type: ignore[attr-defined]
        return made


class Word(enum.StrEnum):
    ONE = "one"
    TWO = enum.auto()


@dataclasses.dataclass
class Creature:
    size: str
    legs: int = 4


class Beast(Creature, enum.Enum):
    BEETLE = "small", 6
    DOG = "medium"


class Operation(enum.Enum):
    ADD = enum.member(functools.partial(lambda left, right: left + right))


@functools.singledispatch
def described(_: object) -> str:
    return "object"


@described.register
def _(_: int) -> str:
    return "int"


@described.register(list)
def _(_: Any) -> str:
    return "list"


class Methods:
    @functools.singledispatchmethod
    def of(self, _: object) -> str:
        return "object"

    @of.register
    def _(self, _: int) -> str:
        return "int"

    @functools.cached_property
    def four(self) -> int:
        """Four."""
        return 4

    @functools.lru_cache  # noqa: B019
    def cached(self, value: int) -> int:
        return value

    part = functools.partialmethod(cached, 3)


Point = collections.namedtuple("Point", "x y", defaults=[3])  # noqa: PYI024


class Row(NamedTuple):
    x: int
    y: str = "y"

    def both(self) -> tuple[int, str]:
        return self.x, self.y


class Options(TypedDict, total=False):
    rate: float


@dataclasses.dataclass(slots=True, frozen=True, order=True)
class Slotted:
    x: int
    y: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Record:
    x: int
    y: int = 2
    z: list[int] = dataclasses.field(default_factory=list, kw_only=True)


@typing.runtime_checkable
class Runs(Protocol):
    def run(self) -> int: ...


class Abstract(abc.ABC):
    @abc.abstractmethod
    def run(self) -> int: ...


class Concrete(Abstract):
    def run(self) -> int:
        return 1


class Registered:
    def run(self) -> int:
        return 2


Abstract.register(Registered)


class Box(Generic[T]):
    value: T


class Wrapper(Generic[P, T]): ...


Alias = Box[int]


class Marking(type):
    def __call__(cls, *arguments: Any) -> Any:
        made = super().__call__(*arguments)
        made.marked = True
        return made


class Marked(metaclass=Marking): ...


class Named:
    def __set_name__(self, _: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, _: type | None = None) -> Any:
        return self if instance is None else self.name


class Holder:
    inner = Named()


class WithSlots:
    __slots__ = ("__weakref__", "x")

    def __init__(self) -> None:
        self.x = 1


class Tagged:
    def __init_subclass__(cls, tag: str = "") -> None:
        cls.tag = tag


class Sub(Tagged, tag="t"): ...


def is_missing(value: object = MISSING) -> bool:
    return value is MISSING


def annotated(value: UserId, *rest: Annotated[int, "meta"]) -> AdminId:
    return AdminId(value)


annotated.__annotations__ = {"value": UserId, "rest": Annotated[int, "meta"], "return": AdminId}


def refuses_abstract() -> bool:
    try:
        Abstract()  # type: ignore[abstract]
    except TypeError:
        return True
    return False


def closed_over() -> Callable[[], Any]:
    inner = NewType("inner", int)
    marker = object()

    def use(given: Any = marker) -> Any:
        return inner(3), given is marker

    return use


def subclassed() -> int:
    made: Any = dataclasses.make_dataclass("Longer", [("w", int, 0)], bases=(Record,))
    return made(1).w


CALLS: dict[str, Callable[[], Any]] = {
    "NewType": lambda: (AdminId(UserId(3)), UserId.__name__, AdminId.__supertype__ is UserId, UserId.__module__),
    "TypeVar": lambda: (T.__name__, T.__bound__ is int),
    "ParamSpec": lambda: (P.__name__, P.args.__origin__ is P),
    "TypeVarTuple": lambda: (Ts.__name__, NativeTs.__name__),
    "TypeAliasType": lambda: (Pair.__name__, typing.get_args(Pair.__value__) == (T, T)),
    "sentinel": lambda: (is_missing(), is_missing(MISSING), is_missing(None), UNDEFINED.label),  # type: ignore[attr-defined]
    "IntFlag": lambda: (
        [Permission.BOTH, Permission.READ | Permission.RUN, Permission(7), Permission.ODD, Permission.NONE],
        [each.name for each in Permission],
        list(Permission.__members__),
        int(~Permission.READ),
    ),
    "Flag": lambda: ((Flags.A | Flags.B) is Flags.AB, [each.name for each in Flags], Flags.BIG.value, Kept(8).value),
    "alias": lambda: (Color.CRIMSON is Color.RED, Color["CRIMSON"].shown, list(Color.__members__), Color(9)),
    "members with attributes": lambda: (Planet.EARTH.mass, Planet((6.4, 3.3)).name, Planet.MARS.radius),
    "members with their own __new__": lambda: (Coordinate.X.label, Coordinate(4).name, bytes(Coordinate.Y)),  # type: ignore[attr-defined]
    "StrEnum": lambda: (Word.TWO, f"{Word.ONE}", Word.ONE + "!"),
    "enum of a dataclass": lambda: (Beast.DOG.legs, Beast.BEETLE.size, Beast.DOG.name),
    "enum of functions": lambda: Operation.ADD.value(1, 2),
    "annotations": lambda: annotated.__annotations__["value"] is UserId,
    "singledispatch": lambda: (described(1), described([]), described(""), described.__name__),
    "singledispatchmethod": lambda: (Methods().of(1), Methods().of("")),
    "cached_property": lambda: (Methods().four == 4, f"{Methods().four}", Methods.four.__doc__),
    "cached methods": lambda: (Methods().cached(5), Methods().part()),
    "namedtuple": lambda: (Point(1), Point._fields, Point(1)._replace(x=2)),
    "NamedTuple": lambda: Row(1).both(),
    "TypedDict": lambda: (Options(rate=1), Options.__optional_keys__),
    "slotted dataclass": lambda: (
        Slotted(1) < Slotted(2),
        hasattr(Slotted(1), "__dict__"),
        dataclasses.astuple(Slotted(1)),
    ),
    "dataclass": lambda: (
        dataclasses.asdict(dataclasses.replace(Record(1), x=4)),
        dataclasses.fields(Record)[0].default is dataclasses.MISSING,
        subclassed(),
    ),
    "Protocol": lambda: (isinstance(Concrete(), Runs), isinstance(3, Runs)),
    "ABC": lambda: (isinstance(Registered(), Abstract), Concrete().run(), refuses_abstract()),
    "Generic": lambda: (typing.get_args(Alias), Box.__parameters__ == (T,), Wrapper.__parameters__ == (P, T)),
    "typing forms": lambda: str((Literal["a"], Annotated[int, 3], int | None, Callable[[int], str])),
    "ContextVar": lambda: (VARIABLE.get(), BARE_VARIABLE.get(9), VARIABLE.name),
    "pattern": lambda: PATTERN.fullmatch("aa") is not None,
    "struct_time": lambda: (STRUCT_TIME.tm_year, struct.calcsize("i")),
    "metaclass": lambda: Marked().marked,  # type: ignore[attr-defined]
    "descriptor": lambda: Holder().inner,
    "slots": lambda: (WithSlots().x, hasattr(WithSlots(), "__dict__"), weakref.ref(WithSlots()) is not None),
    "subclass hook": lambda: Sub.tag,
    "closure": closed_over(),
}
IDENTICAL: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "NewType": (UserId, lambda it: it is UserId),
    "ParamSpec": (P, lambda it: it is P),
    "TypeVarTuple": (Ts, lambda it: it is Ts),
    "TypeVar": (T, lambda it: it is T),
    "sentinel": (MISSING, lambda it: it is MISSING),
    "slotted sentinel": (UNDEFINED, lambda it: it is UNDEFINED),
    "object": (PLAIN, lambda it: it is PLAIN),
    "ContextVar": (VARIABLE, lambda it: it is VARIABLE),
    "member": (Permission.BOTH, lambda it: it is Permission.BOTH),
    "alias": (Color.CRIMSON, lambda it: it is Color.RED),
    "member with attributes": (Planet.MARS, lambda it: it is Planet.MARS),
    "member with its own __new__": (Coordinate.Y, lambda it: it is Coordinate.Y),
    "function that dispatches": (described, lambda it: it(1) == "int"),
}
OTHER_PROCESS = """
import pickle, sys
from skyward.shipping.pickling import pack_result, unpack_call
answers = []
for function, arguments in pickle.load(sys.stdin.buffer):
    try:
        answers.append(pack_result(unpack_call(function)(*unpack_call(arguments)), what="it").data)
    except BaseException as error:
        answers.append(repr(error))
pickle.dump(answers, sys.stdout.buffer)
"""


def main() -> None:
    """Run every case in another process, its function and its arguments pickled apart."""
    cases = [(name, function, ()) for name, function in CALLS.items()]
    cases += [(f"argument {name}", check, (value,)) for name, (value, check) in IDENTICAL.items()]
    cases += [(f"result {name}", lambda it: it, (value,)) for name, (value, _) in IDENTICAL.items()]
    sent = [(pack(function, what=name).data, pack(given, what=name).data) for name, function, given in cases]
    there = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS], input=pickle.dumps(sent), capture_output=True, check=True
    )
    wrong: dict[str, str] = {}
    for (name, function, given), answer in zip(cases, pickle.loads(there.stdout), strict=True):
        expected = function(*given)
        got = answer if isinstance(answer, str) else unpack(answer)
        if (got is not expected) if name.startswith("result") else (got != expected or repr(got) != repr(expected)):
            wrong[name] = f"{got!r} instead of {expected!r}"
    sys.stdout.write(json.dumps({"wrong": wrong, "cases": len(cases)}))


if __name__ == "__main__":
    main()
