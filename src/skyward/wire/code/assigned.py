"""Notice about values that a program has assigned to its own modules from outside, which calls do not see.

A project module is imported where the call runs, from its source: ``config.LR = 0.5`` in a script stays in the script.
"""

from __future__ import annotations

import dis
import logging
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any, Final

from skyward.wire.code.modules import SourceSet, code_here

__all__ = ["assigned_from_outside", "report_assigned"]

log = logging.getLogger("skyward.wire")

_PLAIN: Final = (bool, int, float, str, type(None))
_STORE_GLOBAL: Final = dis.opmap["STORE_GLOBAL"]
_reported: set[tuple[str, str]] = set()
_examined: set[int] = set()


def report_assigned(sources: SourceSet | None) -> None:
    """Log a warning, once for each, for values in loaded modules of ``sources`` that calls will not see."""
    if sources is None or sources.number in _examined:
        return
    _examined.add(sources.number)
    for source in sources.sources:
        module, code = sys.modules.get(source.name), code_here(source.name)
        if module is None or code is None:
            continue
        for name, before, now in assigned_from_outside(module, code):
            if (source.name, name) not in _reported:
                _reported.add((source.name, name))
                log.warning(
                    "%s.%s is %r here, and %r in calls: they import %s themselves, from its source. Pass the value as "
                    "an argument, or assign it in the call",
                    *(source.name, name, now, before, source.name),
                )


def assigned_from_outside(module: ModuleType, code: CodeType) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, former and present value of numbers, texts and the like that were assigned from another module.

    Those that the module's own code sets once, to a constant, and no function of it sets anew.
    """
    own = set(_set_by_functions(code))
    for name, before in _constants(code).items():
        now = vars(module).get(name, before)
        if name not in own and isinstance(now, _PLAIN) and repr(now) != repr(before):  # 1 is True, and NaN is not NaN
            yield name, before, now


def _constants(code: CodeType) -> Mapping[str, Any]:
    """Return the names that a module's code sets to a plain constant and nowhere else."""
    found: dict[str, Any] = {}
    stored: set[str] = set()
    before: dis.Instruction | None = None
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_NAME", "STORE_GLOBAL", "DELETE_NAME"):
            name = step.argval
            if name not in stored and before is not None and _is_plain_constant(before):
                found[name] = before.argval
            else:
                found.pop(name, None)
            stored.add(name)
        if step.opname != "EXTENDED_ARG":
            before = step
    return found


def _is_plain_constant(step: dis.Instruction) -> bool:
    return step.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")) and isinstance(step.argval, _PLAIN)


def _set_by_functions(code: CodeType) -> Iterator[str]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if _STORE_GLOBAL in inner.co_code[::2]:
                yield from (step.argval for step in dis.get_instructions(inner) if step.opname == "STORE_GLOBAL")
            yield from _set_by_functions(inner)
