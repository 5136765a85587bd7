"""Names of options: the error of an unknown one has the closest valid name, and all valid ones."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["explain_options", "option_names", "refuse_unknown", "unknown_option"]

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
