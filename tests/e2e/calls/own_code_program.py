"""Program of a user: a script with a project, whose code does in calls what it does here. Prints results as JSON."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import pickle
import sys
import threading
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor
from own import helpers, models, state

import skyward as sky
from skyward.integrations import joblib_backend


class Base:
    pass


@dataclasses.dataclass
class Config:
    base: Base
    rate: float = 0.1


class Color(enum.Enum):
    RED = 1


class Named(typing.NamedTuple):
    only_in_annotations: typing.Optional[Mentioned] = None  # noqa: UP045 - an alias of typing


class Mentioned:
    class Inner:
        pass


class Counter:
    pass


def copied(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


def script_object() -> Any:
    return type(copied(Config(Base()))) is Config


def script_enum() -> Any:
    return copied(Color.RED) is Color.RED


def script_function() -> Any:
    return copied(copied) is copied


def script_hints() -> Any:
    return typing.get_type_hints(Config)["base"] is Base


def script_hints_alone() -> Any:
    return str(typing.get_type_hints(Named)["only_in_annotations"])


def script_inner_class() -> Any:
    return type(copied(Mentioned.Inner())) is Mentioned.Inner


def script_module() -> Any:
    here = sys.modules[__name__]
    return here.Config is Config and vars(here) is globals()  # type: ignore[attr-defined]


def script_joblib() -> Any:
    import joblib

    joblib.dump(Config(Base()), "config.joblib")
    return type(joblib.load("config.joblib")) is Config


def script_object_in_a_child() -> Any:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return type(pool.apply(same, (Config(Base()),))) is Config


def same(value: object) -> object:
    return value


def project_object() -> Any:
    return isinstance(copied(models.Model()), models.Model)


def project_source() -> Any:
    return "class Model" in inspect.getsource(models.Model) and "def size" in inspect.getsource(models.Model.size)


def project_imported_late() -> Any:
    from own.models import Model

    return Model is models.Model


def project_plugin() -> Any:
    return importlib.import_module("own.plugins.first").NAME


def project_child() -> Any:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return type(pool.apply(same, (models.Model(),))) is models.Model


def project_pipeline() -> Any:
    from sklearn.pipeline import Pipeline

    steps = [("scale", models.Scale()), ("last", models.Scale())]
    pipeline = Pipeline(steps, memory="cache")
    return [pipeline.fit([[1.0]]).transform([[3.0]]) for _ in range(2)]


def project_lock() -> Any:
    return helpers.locked()


def shadowed() -> Any:
    import yaml

    return yaml.safe_load("1")


def shadowed_in_dask() -> Any:
    import dask.config

    Path("one.yaml").write_text("a: 1\n", encoding="utf-8")
    return [*dask.config.collect_yaml(["one.yaml"])]


CHECKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "pickle of a script's object": (script_object, True),
    "pickle of a script's enum": (script_enum, True),
    "pickle of a script's function": (script_function, True),
    "hints of a script's class": (script_hints, True),
    "hints that nothing else needs": (script_hints_alone, "typing.Optional[__main__.Mentioned]"),
    "pickle of an inner class's object": (script_inner_class, True),
    "a script's module": (script_module, True),
    "joblib.dump of a script's object": (script_joblib, True),
    "a script's object in a child": (script_object_in_a_child, True),
    "pickle of a project's object": (project_object, True),
    "source of a project's class": (project_source, True),
    "import in a function": (project_imported_late, True),
    "import by a name": (project_plugin, "first"),
    "a project's object in a child": (project_child, True),
    "a pipeline with a memory": (project_pipeline, [[[3.0]], [[3.0]]]),
    "a lock of a module": (project_lock, "locked"),
    "data of a package": (helpers.data, "hello"),
    "resources of a package": (helpers.resource, "deep"),
    "circular imports": (helpers.around, "around"),
    "names by a star": (helpers.starred, 7),
    "a module that has an installed one's name": (shadowed, "mine"),
    "the installed one for its users": (shadowed_in_dask, [{"a": 1}]),
}


class Tasked:
    def is_found(self) -> bool:
        return type(copied(self)) is Tasked


def in_order(pool: sky.ComputePool) -> dict[str, Any]:
    """What several calls together show."""
    found: dict[str, Any] = {}
    with pool.dask_client() as client:
        found["pickle in a task of Dask's"] = client.submit(Tasked().is_found).result()
        found["a project in a task of Dask's"] = client.submit(project_object).result()
    with joblib_backend(pool):
        found["pickle in a task of joblib's"] = Parallel()(delayed(script_object)() for _ in range(2))
    found["state of a module"] = [pool.submit(state.count).result() for _ in range(3)]
    found["state of a class"] = [pool.submit(models.Model().hit).result() for _ in range(3)]
    found["state by argument"] = [pool.submit(models.hit, models.Model()).result() for _ in range(2)]
    found["nothing changed here"] = [state.COUNT, models.Model.hits]
    found["class of a result"] = type(pool.submit(models.Model).result()) is models.Model
    found["class of an error"] = type(pool.submit(models.fail).exception()) is models.ModelError
    Path(str(models.__file__)).with_name("settings.py").write_text("VALUE = 2222\n", encoding="utf-8")
    found["edited, not reloaded"] = pool.submit(helpers.setting).result()
    importlib.reload(sys.modules["own.settings"])
    found["edited and reloaded"] = pool.submit(helpers.setting).result()
    found["state of other modules"] = pool.submit(state.count).result()
    found["a thread of an earlier call"] = earlier_thread(pool)
    return found


FACTOR = 1


def earlier_thread(pool: sky.ComputePool) -> Any:
    """A call leaves a thread behind, then the script's variable changes, and another call runs."""
    global FACTOR  # noqa: PLW0603 - as a script does

    def leave() -> None:
        started = threading.Event()
        sys.modules["_kept"] = typing.cast("Any", (started, found := []))
        threading.Thread(target=lambda: (started.wait(), found.append(factor()))).start()

    def look() -> Any:
        started, found = typing.cast("Any", sys.modules["_kept"])
        started.set()
        while not found:
            pass
        return found[0], factor()

    pool.submit(leave).result()
    FACTOR = 2
    return pool.submit(look).result()


def factor() -> int:
    return FACTOR


def result_of(function: Callable[[], Any], pool: sky.ComputePool) -> Any:
    try:
        return sky.compute(function)() >> pool
    except Exception as error:  # one of many
        return f"{type(error).__name__}: {error}"


def find_own_yaml() -> None:
    """As if the script had a ``yaml.py`` beside it; Dask could not be imported here, then."""
    import distributed  # noqa: F401

    for name in [name for name in sys.modules if name.partition(".")[0] == "yaml"]:
        del sys.modules[name]
    sys.path.insert(0, str(Path(__file__).with_name("shadows")))


def main() -> None:
    find_own_yaml()
    results: dict[str, Any] = {}
    with sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        results["checks"] = {name: [result_of(function, pool), value] for name, (function, value) in CHECKS.items()}
        results |= in_order(pool)
    results["registry"] = sorted(cloudpickle.list_registry_pickle_by_value())
    results["loky afterwards"] = get_reusable_executor(1).submit(helpers.starred).result()
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
