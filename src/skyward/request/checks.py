"""Checks of parameters and of their names: they return the value with its type, or raise with the allowed values."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from skyward.errors import ConfigurationError

_USER = re.compile(r"(?<=://)[^/\s]+@")  # a password may hold an @ itself
_PARAMETER = re.compile(
    r"""([?&;][\w.-]*(?:token|key|secret|password|passwd|signature|credential|sig|auth)[\w.-]*=)[^&;#\s'"]+""",
    re.ASCII | re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Return ``text`` with ``***`` for the user in each URL, and for query parameters with names of secrets."""
    return _PARAMETER.sub(r"\1***", _USER.sub("***@", text))


_TOKEN = re.compile(r"(?<=/)(?=[^/]*[a-z])(?=[^/]*[A-Z])(?=[^/]*\d)[\w-]{16,}(?=/)", re.ASCII)
"""Part of a path that no one would choose as a name, such as a token of Cloudsmith or Gemfury."""


def bare_url(url: str) -> str:
    """Return a URL without anything that may be a secret: user, query, fragment, and tokens in its path.

    The user of SSH stays if it has no password: ``ssh://git@host``.
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    keeps_user = parts.scheme.endswith("ssh") and ":" not in user
    path = _TOKEN.sub("***", parts.path)
    return parts._replace(netloc=parts.netloc if keeps_user else host, path=path, query="", fragment="").geturl()


_LISTED = 12
"""Most names that are listed where none resembles the requested one."""
_GIB_PER_UNIT = {"M": 1 / 1024, "G": 1.0, "T": 1024.0}
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([MGT])i?B\s*", re.IGNORECASE | re.ASCII)


def refusal(parameter: str, allowed: str, given: object) -> ConfigurationError:
    """Return an error that names the parameter, its allowed values and the given one, without credentials in URLs."""
    shown = without_credentials(given) if isinstance(given, str) else given
    return ConfigurationError(f"{parameter} must be {allowed}, got {reprlib.repr(shown)}")


def whole_number(parameter: str, value: object, *, minimum: int = 1) -> int:
    """Return ``value`` if it is an int, no bool, of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise refusal(parameter, f"a whole number ≥ {minimum}", value)
    return value


def positive_number(parameter: str, value: object) -> float:
    """Return ``value`` as a float if it is an int or float above zero that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        huge = isinstance(value, int | float) and value > sys.float_info.max
        raise refusal(parameter, "a number > 0 and finite" if huge else "a number > 0", value)
    return float(value)


def flag(parameter: str, value: object) -> bool:
    """Return ``value`` if it is a bool."""
    if not isinstance(value, bool):
        raise refusal(parameter, "True or False", value)
    return value


def text(parameter: str, value: object, *, allowed: str = "non-empty text") -> str:
    """Return ``value`` if it is a string that is not blank and can pass through a command line."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise refusal(parameter, allowed, value)
    return value


def web_address(parameter: str, value: object) -> str:
    """Return ``value`` if it is a URL of a server."""
    if not text(parameter, value).startswith(("http://", "https://")):
        raise refusal(parameter, "a URL such as 'http://127.0.0.1:5000'", value)
    return cast("str", value)


def secret(parameter: str, value: object) -> str:
    """Return ``value`` without blanks around it if it is printable ASCII in one word; the error does not repeat it."""
    found = value.strip() if isinstance(value, str) else ""
    if not found.isascii() or not found.isprintable() or len(found.split()) != 1:
        raise ConfigurationError(f"{parameter} must be text of printable ASCII characters without blanks")
    return found


def texts(parameter: str, value: object) -> tuple[str, ...]:
    """Return ``value`` as a tuple if it is a sequence of strings, none of which looks like an option."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        example = f", as in {parameter}=[...]" if isinstance(value, str) else ""
        raise refusal(parameter, f"a list of strings{example}", value)
    items = tuple(text(f"{parameter}[{i}]", item) for i, item in enumerate(cast("Sequence[object]", value)))
    for i, item in enumerate(items):
        if item.lstrip().startswith("-"):
            raise refusal(f"{parameter}[{i}]", "a value, not an option", item)
    return items


def gibibytes(parameter: str, value: object) -> float:
    """Return a memory size such as ``"32GB"`` or ``"1.5 TiB"`` in GiB.

    "GB" is read as GiB, as machines and accelerators are sold: a machine never has less than the request.
    """
    match = _MEMORY.fullmatch(value) if isinstance(value, str) else None
    if match is None or not float(match[1]):
        raise refusal(parameter, 'a size such as "32GB"', value)
    return float(match[1]) * _GIB_PER_UNIT[match[2].upper()]


_SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])", re.IGNORECASE | re.ASCII)
_DURATIONS = re.compile(rf"\s*(?:{_DURATION.pattern}\s*)+", re.IGNORECASE | re.ASCII)


def duration(parameter: str, value: object) -> float:
    """Return a length of time above zero in seconds: of text such as ``"90s"`` or ``"1h 30m"``, or a number of them."""
    if not isinstance(value, str):
        return positive_number(parameter, value)
    parts = _DURATION.findall(value) if _DURATIONS.fullmatch(value) else []
    seconds = sum(float(number) * _SECONDS_PER_UNIT[unit.lower()] for number, unit in parts)
    if not 0 < seconds <= sys.float_info.max:
        raise refusal(parameter, 'a length of time such as "20m", "1h 30m" or "90s", or a number of seconds > 0', value)
    return seconds


T = TypeVar("T")

_OTHER_WORDS = {
    "accelerator": "device gpu gpu_count gpu_type gpus num_gpus",
    "concurrency": "max_workers n_jobs n_processes n_workers num_workers processes workers workers_per_node",
    "container_disk_gb": "disk disk_gb disk_size",
    "count": "gpu_count gpus num num_gpus number",
    "cpu": "cores cpu_count num_cpus vcpus",
    "data_centers": "location locations region regions zone zones",
    "hosts": "addresses machines nodes",
    "key_path": "identity_file key key_file key_filename private_key ssh_key",
    "machine": "flavor instance instance_type machine_type vm_size",
    "max_cost": "budget cost_limit max_spend",
    "max_price_per_hour": "max_price price price_limit",
    "memory": "mem ram",
    "mount_path": "folder mount path target",
    "name": "gpu gpu_type model type",
    "nodes": "instances machines n_nodes node_count num_instances num_nodes size",
    "pip": "dependencies packages requirements",
    "region": "availability_zone data_center datacenter location zone",
    "regions": "countries country location locations zone",
    "retries": "attempts max_retries",
    "spot": "interruptible preemptible",
    "timeout": "max_lifetime ttl",
    "token": "api_key key",
    "user": "login",
}
"""An option, and its names in other libraries that do not resemble it."""

_ELSEWHERE = {
    "image=Image({}=...)": "apt find_links includes mirror outputs pip_extra_index_url pip_index_url python",
    "provider=SSH({}=...)": "hosts key_path known_hosts user",
    "@compute({}=...), or on a call with f(...).options({}=...)": "retries",
    "@compute({}=...)": "retry",
}
"""Where an option is given, and the options that are easily taken for a pool's."""


_NONE = "it takes none: options of a pool belong to ComputePool"


def closest(name: str, names: Collection[str]) -> str:
    """Return the end of a message about an unknown ``name``: ``"; closest: a, b"``, with up to three similar names.

    Without similar names it lists all of them, and is empty if they are many, or none.
    """
    if similar := difflib.get_close_matches(name, names, n=3, cutoff=0.3):
        return f"; closest: {', '.join(similar)}"
    return f"; it has {', '.join(sorted(names))}" if 0 < len(names) <= _LISTED else ""


def unknown_option(owner: str, unknown: Iterable[str], allowed: Iterable[str]) -> TypeError:
    """Return the error of options that ``owner`` does not have; it lists those that there are."""
    name, valid = next(iter(unknown)), sorted(allowed)
    if not valid:
        return TypeError(f"{owner} has no option {name!r}; {_NONE}")
    close = [each for each in valid if name in _OTHER_WORDS.get(each, "").split()]
    place = next((each for each, names in _ELSEWHERE.items() if not close and name in names.split()), "")
    close = close or difflib.get_close_matches(name, valid, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    hint = f" (give it as {place.replace('{}', name)})" if place else hint
    return TypeError(f"{owner} has no option {name!r}{hint}; its options are {', '.join(valid)}")


def _unnamed_option(owner: str, allowed: Iterable[str]) -> TypeError:
    """Return the error of a value without a name. The value may be a secret: it is not shown."""
    if not (valid := sorted(allowed)):
        return TypeError(f"{owner} was given an option; {_NONE}")
    return TypeError(f"{owner} takes its options by name; its options are {', '.join(valid)}")


def option_names(*constructors: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that the constructors take together, without ``*args`` and ``**kwargs``."""
    parameters = [each for one in constructors for each in inspect.signature(one).parameters.values()]
    return [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def refuse_unknown(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise TypeError for the first of the given names that is not allowed."""
    if unknown := [name for name in given if name not in allowed]:
        raise unknown_option(owner, unknown, allowed)


def explain_options(cls: type[T]) -> type[T]:
    """Decorate a class of keyword parameters: errors of unknown ones, and of values without a name, list them.

    It stands above ``@dataclass``, which makes a new class for slots. A subclass that is a dataclass needs it again.
    """
    init: Callable[..., None] = cls.__init__
    allowed = option_names(init)[1:]
    parameters = inspect.signature(init).parameters
    required = [name for name in allowed if parameters[name].default is inspect.Parameter.empty]

    @functools.wraps(init)
    def construct(self: T, *args: object, **kwargs: Any) -> None:
        owner = type(self).__name__
        if args:
            raise _unnamed_option(owner, allowed)
        refuse_unknown(owner, kwargs, allowed)
        if missing := [name for name in required if name not in kwargs]:
            raise TypeError(f"{owner} needs {' and '.join(missing)}; its options are {', '.join(sorted(allowed))}")
        init(self, **kwargs)

    cls.__init__ = construct
    return cls


def checked_patterns(parameter: str, value: object) -> tuple[str, ...]:
    """Return patterns of files, such as ``"*.bin"`` or ``"models/"``, that cannot leave the folder.

    Raises :class:`~skyward.errors.ConfigurationError`.
    """
    patterns = texts(parameter, [value] if isinstance(value, str) else value)
    for pattern in patterns:
        path = PurePosixPath(pattern)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise ConfigurationError(
                f"{parameter} must stay in the working folder of the node's calls, such as '*.bin', 'models/' or '**', "
                f"got {pattern!r}"
            )
    return patterns


def is_matched(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches a file of this name, or a folder that it is in."""
    parts = PurePosixPath(name).parts
    return "\0" not in name and any(
        _matches(parts[:count], PurePosixPath(pattern).parts) for pattern in patterns for count in range(len(parts) + 1)
    )


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if not any(each.startswith(".") for each in pattern) and any(each.startswith(".") for each in parts):
        return False  # hidden files, unless a pattern names one
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (bool(parts) and _matches(parts[1:], pattern))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
