"""Every name that the specification shows exists and takes what is shown; tests/e2e/calls/test_spec.py uses them."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import skyward as sky
from skyward import NVIDIA, Accelerator, Image, S3Volume, Spot

SPEC = Path(__file__).parents[4] / "shared" / "spec"
PAGES = ("concepts.md", "api-reference.md", "accelerators.md")
REQUIRED = inspect.Parameter.empty


def words(text: str) -> list[str]:
    return text.split()


IMPORTS = {
    "skyward": words("""
        Accelerator ComputePool DistributedSampler Image InstanceInfo LogLine Metrics MultiPool NVIDIA S3Volume Spot
        compose compute current_accelerator emit gather instance_info is_nvidia is_trainium select_instance shard
        use_callback
    """),
    "skyward.integrations": ["JoblibPool", "ScikitLearnPool", "joblib_backend", "sklearn_backend"],
}
SHOWN = words("""
    BootstrapCompleted BootstrapProgress BootstrapStarting Callback ComputeFunction CostFinal CostUpdate Error
    InfraCreated InfraCreating InstanceLaunching InstanceProvisioned InstanceStopping PendingBatch PendingCompute
    PoolStarted PoolStopping ProviderName SkywardEvent SpotLike
""")
"""Used or defined on the pages, without an import line."""

CLOUD = ["DigitalOcean", "RunPod", "VastAI", "Verda", "distributed"]
"""Names that come with the clouds, and with training on several nodes."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "ComputePool": {
        "provider": REQUIRED,
        "image": None,
        "nodes": 1,
        "machine": None,
        "accelerator": None,
        "cpu": None,
        "memory": None,
        "volume": None,
        "spot": "always",
        "timeout": 3600,
        "env": None,
        "concurrency": 1,
        "display": "log",
        "on_event": None,
        "collect_metrics": True,
        "pip": None,
    },
    "ComputePool.run": {"pending": REQUIRED},
    "ComputePool.run_batch": {"batch": REQUIRED},
    "ComputePool.broadcast": {"pending": REQUIRED},
    "Image": {"python": None, "pip": (), "pip_extra_index_url": None, "apt": (), "env": None},
    "Image.content_hash": {},
    "Image.bootstrap": {"ttl": 0},
    "S3Volume": {"mount_path": REQUIRED, "bucket": REQUIRED, "prefix": "", "read_only": True},
    "Spot.Always": {"retries": 10, "interval": 1.0},
    "Spot.IfAvailable": {},
    "Spot.Never": {},
    "shard": {"shuffle": False, "seed": None},
    "DistributedSampler": {"dataset": REQUIRED, "shuffle": True},
    "DistributedSampler.set_epoch": {"epoch": REQUIRED},
    "instance_info": {},
    "current_accelerator": {},
    "is_nvidia": {"accelerator": REQUIRED},
    "is_trainium": {"accelerator": REQUIRED},
    "select_instance": {"available": REQUIRED, "accelerator": None, "cpu": None, "memory": None},
    "emit": {"event": REQUIRED},
    "use_callback": {"callback": REQUIRED},
    "integrations.JoblibPool": {"joblib_version": None},
    "integrations.ScikitLearnPool": {"sklearn_version": None},
    "integrations.joblib_backend": {"pool": REQUIRED},
    "integrations.sklearn_backend": {"pool": REQUIRED},
    "Accelerator.NVIDIA.H100": {"count": 1, "memory": None, "mig": None, "form_factor": None},
    "Accelerator.NVIDIA.A100": {"count": 1, "memory": None, "mig": None},
    "Accelerator.NVIDIA.V100": {"count": 1, "memory": None},
    **{
        f"Accelerator.NVIDIA.{name}": {"count": 1}
        for name in ("H200", "B100", "B200", "GB200", "GH200", "L4", "L40", "L40S", "T4", "A10", "A10G")
    },
    "Accelerator.AWS.Trainium": {"version": 2},
    "Accelerator.AWS.Inferentia": {"version": 2},
    "Accelerator.Google.TPU": {"version": "v5p"},
    "Accelerator.Google.TPUSlice": {},
    "Accelerator.AMD.MI": {},
    "Accelerator.AMD.RadeonPro": {},
    "Spot.Percent": {},
}
"""Parameters and their defaults, where DESIGN §7 does not decide otherwise."""

VARIADIC = ["MultiPool", "gather", "compose", "shard"]
ATTRIBUTES = {
    "ComputePool": ["is_active", "instance_count", "on", "__enter__", "__exit__"],
    "PendingCompute": ["__rshift__", "__matmul__", "__and__"],
    "PendingBatch": ["__rshift__", "__and__"],
    "ComputeFunction": ["local", "__call__"],
    "Metrics": ["cpu", "gpu", "memory"],
}
FIELDS = {
    "InstanceInfo": words("node total_nodes is_head accelerators head_addr head_port job_id worker workers_per_node"),
    "InfraCreating": [],
    "InfraCreated": ["region"],
    "InstanceLaunching": ["count", "instance_type", "provider"],
    "InstanceProvisioned": words("instance_id node spot provider ip instance_type price_on_demand price_spot"),
    "BootstrapStarting": ["instance_id"],
    "BootstrapProgress": ["instance_id", "step"],
    "BootstrapCompleted": ["instance_id"],
    "Metrics": words("""
        instance_id node cpu_percent memory_percent memory_used_mb memory_total_mb gpu_utilization gpu_memory_used_mb
        gpu_memory_total_mb gpu_temperature
    """),
    "LogLine": ["node", "instance_id", "line", "timestamp"],
    "InstanceStopping": ["instance_id"],
    "PoolStopping": [],
    "CostUpdate": words("elapsed_seconds accumulated_cost hourly_rate spot_count ondemand_count"),
    "CostFinal": words("total_cost total_seconds hourly_rate spot_count ondemand_count savings_vs_ondemand"),
    "Error": ["message", "instance_id"],
}
NVIDIA_VALUES = words("""
    T4 L4 L40 L40S A10 A10G A100-40GB A100-80GB H100-80GB H100-SXM H100-PCIe H100-NVL H200 B100 B200 GB200 GH200
""")
MIG = {
    "80GB": {"1g.10gb": 7, "1g.20gb": 4, "2g.20gb": 3, "3g.40gb": 2, "4g.40gb": 1, "7g.80gb": 1},
    "40GB": {"1g.5gb": 7, "2g.10gb": 3, "3g.20gb": 2, "4g.20gb": 1},
}
NOT_OURS = {
    *words("P R T False None True bool dict float int list max str sum tuple t_i"),
    *words("Provider Volume Sequence computations pools arrays"),
    *words("ams3 fra1 lon1 nyc1 nyc3 sfo2 sfo3 sgp1 tor1 inf2 trn1 trn2 xlarge region use_ssm"),
    *words("backend keras torch jax tensorflow transformers add model"),  # of `distributed`, and of the examples
}
"""What the pages name that is Python's, a type or a variadic parameter in a table, a cloud's or an example's."""


def find(name: str) -> Any:
    value: Any = sky
    for part in name.split("."):
        value = getattr(value, part)
    return value


def signature(name: str) -> dict[str, inspect.Parameter]:
    target = find(name)
    if isinstance(target, enum.Enum):
        target = target.__call__  # from Python 3.12 on, a member's signature is that of its class
    parameters = dict(inspect.signature(target).parameters)
    if inspect.isfunction(target) and "." in name and next(iter(parameters), None) == "self":
        del parameters["self"]
    return parameters


def test_name_is_importable_from_where_the_pages_say(subtests: pytest.Subtests) -> None:
    for module, name in [(module, name) for module, names in IMPORTS.items() for name in names]:
        with subtests.test(module=module, name=name):
            assert getattr(importlib.import_module(module), name) is not None
            assert name in importlib.import_module(module).__all__


def test_name_that_is_shown_without_an_import_is_public_too(subtests: pytest.Subtests) -> None:
    for name in [*SHOWN, *FIELDS]:
        with subtests.test(name=name):
            assert name in sky.__all__
            assert find(name) is not None


def test_parameters_and_defaults_are_those_of_the_pages(subtests: pytest.Subtests) -> None:
    for name, shown in PARAMETERS.items():
        with subtests.test(name=name):
            parameters = signature(name)

            assert {key: parameters[key].default for key in shown} == shown
            assert all(parameters[key].kind is not inspect.Parameter.POSITIONAL_ONLY for key in shown)


def test_nothing_is_required_beside_what_the_pages_show(subtests: pytest.Subtests) -> None:
    for name, defaults in PARAMETERS.items():
        with subtests.test(name=name):
            variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            required = {
                key for key, each in signature(name).items() if each.default is REQUIRED and each.kind not in variadic
            }
            shown = {key for key, default in defaults.items() if default is REQUIRED}

            assert required - shown <= {
                "name",
                "model",
                "share",
            }  # by position: TPUSlice("v5p-8"), MI("300X"), Percent(0.8)


@pytest.mark.parametrize("name", VARIADIC)
def test_any_number_is_taken(name: str) -> None:
    assert any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature(name).values())


@pytest.mark.parametrize("name", ["integrations.JoblibPool", "integrations.ScikitLearnPool"])
def test_joblib_pools_take_every_parameter_of_a_pool(name: str) -> None:
    everything: dict[str, Any] = {
        "provider": sky.Local(),
        "image": Image(pip=["joblib", "scikit-learn"]),
        "nodes": 4,
        "machine": "p5.48xlarge",
        "accelerator": "A100",
        "cpu": 1,
        "memory": "32GB",
        "volume": [S3Volume(mount_path="/data", bucket="my-bucket")],
        "spot": 0.8,
        "timeout": 60,
        "env": {"A": "1"},
        "concurrency": 4,
        "display": "spinner",
        "on_event": print,
        "collect_metrics": False,
        "pip": ["numpy"],
    }
    assert set(everything) == set(PARAMETERS["ComputePool"])

    find(name)(**everything)


def test_attribute_of_the_pages_exists(subtests: pytest.Subtests) -> None:
    for owner, name in [(owner, name) for owner, names in ATTRIBUTES.items() for name in names]:
        with subtests.test(owner=owner, name=name):
            assert hasattr(find(owner), name)


def test_fields_come_in_the_order_of_the_pages(subtests: pytest.Subtests) -> None:
    for name, shown in FIELDS.items():
        with subtests.test(name=name):
            kind = find(name)
            assert [field.name for field in fields(kind)][: len(shown)] == shown

            values = [f"value {number}" for number in range(len(shown))]
            by_position, by_name = kind(*values), kind(**dict(zip(shown, values, strict=True)))

            assert by_position == by_name
            assert [getattr(by_position, field) for field in shown] == values


def test_generic_types_can_be_written_with_their_parameters() -> None:
    def run(pending: sky.PendingCompute[int], fn: sky.ComputeFunction[[int], int], gpu: NVIDIA, back: sky.Callback): ...

    assert set(get_type_hints(run)) == {"pending", "fn", "gpu", "back"}


def test_every_listed_nvidia_name_is_a_value_and_names_a_gpu(subtests: pytest.Subtests) -> None:
    for name in NVIDIA_VALUES:
        with subtests.test(name=name):
            assert NVIDIA(name).value == name
            assert Accelerator(name=name).name == name.partition("-")[0]
            assert sky.is_nvidia(name)


@pytest.mark.parametrize("factory", [Accelerator.NVIDIA.H100, Accelerator.NVIDIA.A100])
def test_mig_profiles_make_the_workers_of_the_tables(factory: Callable[..., Accelerator]) -> None:
    assert {name: factory(mig=name).partitions for name in MIG["80GB"]} == MIG["80GB"]


def test_mig_profiles_of_the_small_a100_make_the_workers_of_the_table() -> None:
    made = {name: Accelerator.NVIDIA.A100(memory="40GB", mig=name).partitions for name in MIG["40GB"]}
    assert made == MIG["40GB"]


def test_factories_take_their_arguments_by_position() -> None:
    nvidia = Accelerator.NVIDIA
    assert nvidia.H100(4, "80GB", "3g.40gb") == nvidia.H100(count=4, memory="80GB", mig="3g.40gb")
    assert nvidia.A100(2, "40GB", ["1g.5gb"]) == nvidia.A100(count=2, memory="40GB", mig=["1g.5gb"])
    assert nvidia.V100(1, "32GB") == nvidia.V100(memory="32GB")
    assert nvidia.L40S(8) == nvidia.L40S(count=8)
    assert Accelerator.AWS.Trainium(1).name == "Trainium1"
    assert Accelerator.Google.TPU("v5e").name == "TPU-v5e"
    assert Accelerator.AMD.MI("300X") == Accelerator.AMD.MI(model="300X")
    assert Spot.Always(3, 0.5) == Spot.Always(retries=3, interval=0.5)
    assert Spot.Percent(0.8) == Spot.Percent(share=0.8)


POOLS: list[dict[str, Any]] = [
    {"nodes": 2, "accelerator": "A100", "image": Image(pip=["torch"]), "spot": "always", "timeout": 3600},
    {"image": Image(pip=["torch", "numpy"], apt=["ffmpeg", "libsndfile1"], env={"KERAS_BACKEND": "jax"})},
    {"image": Image(pip=["torch"], pip_extra_index_url="https://download.pytorch.org/whl/cu124")},
    {"pip": ["torch"]},
    {"machine": "p5.48xlarge", "cpu": 32, "memory": "128GB"},
    *({"accelerator": name} for name in ("T4", "A100", "H100", NVIDIA.A100, Accelerator.NVIDIA.H100())),
    {"accelerator": Accelerator.NVIDIA.A100(count=4)},
    {"accelerator": Accelerator.NVIDIA.H100(mig="3g.40gb")},
    {"accelerator": Accelerator.NVIDIA.A100(mig=["3g.40gb", "3g.40gb"])},
    {"accelerator": Accelerator.AWS.Trainium(version=2), "pip": ["torch-neuronx"]},
    {"accelerator": Accelerator.AWS.Inferentia(version=2), "pip": ["torch-neuronx"]},
    {"accelerator": Accelerator.Google.TPUSlice("v5p-8")},
    {"accelerator": Accelerator.AMD.RadeonPro("V710")},
    *({"spot": short} for short in ("always", "if-available", "never", 0.8)),
    *({"spot": spot} for spot in (Spot.Always(), Spot.IfAvailable(), Spot.Never, Spot.Never(), Spot.Percent(0.8))),
    *({"display": display} for display in ("log", "spinner", "quiet")),
    {
        "volume": [
            S3Volume(mount_path="/data", bucket="my-bucket", prefix="datasets/", read_only=True),
            S3Volume(mount_path="/checkpoints", bucket="my-bucket", prefix="models/", read_only=False),
        ]
    },
]


def test_the_pools_of_the_pages_can_be_made_without_starting_anything(subtests: pytest.Subtests) -> None:
    for parameters in POOLS:
        with subtests.test(parameters=parameters):
            pool = sky.ComputePool(provider=sky.Local(), **parameters)

            assert not pool.is_active
            assert pool.instance_count == 0


def test_a_pool_needs_a_provider() -> None:
    with pytest.raises(TypeError, match="provider"):
        sky.ComputePool()  # pyright: ignore[reportCallIssue]


def test_mig_partitions_are_workers() -> None:
    pool = sky.ComputePool(provider=sky.Local(), accelerator=Accelerator.NVIDIA.H100(mig="3g.40gb"), concurrency=3)
    assert pool.capacity == 6


# --- the pages themselves ---------------------------------------------------------------------------------------------


def known_names() -> set[str]:
    names = {*CLOUD, *SHOWN, *NOT_OURS, *PARAMETERS, *FIELDS, *NVIDIA_VALUES, *ATTRIBUTES, *VARIADIC, *IMPORTS}
    for group in (IMPORTS, PARAMETERS, ATTRIBUTES, FIELDS, MIG):
        names.update(name for parts in group.values() for name in parts)
    return {part for name in names for part in re.findall(r"\w+", name)}


def snippets(page: str) -> Iterator[str]:
    return (match[1] for match in re.finditer(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


def named_in_code(tree: ast.AST) -> Iterator[str]:
    """What a snippet imports from us, defines as a class, calls on our objects, and gives to us by keyword."""
    ours = {name for names in (*IMPORTS.values(), CLOUD) for name in names} | set(SHOWN)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module) if module and module.partition(".")[0] == "skyward":
                yield from (alias.name for alias in node.names)
            case ast.ClassDef():
                yield node.name
                yield from (line.target.id for line in node.body if isinstance(line, ast.AnnAssign))  # type: ignore[union-attr]
            case ast.Attribute() if (path := ast.unparse(node).split("."))[0] in {*ours, "pool", "info", "sampler"}:
                yield from path[1:]
            case ast.Call() if re.match(r"\w+", ast.unparse(node.func))[0] in ours:  # type: ignore[index]
                yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def named_in_prose(page: str) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    for quoted in re.findall(r"`([^`]+)`", text):
        if re.match(r"[*A-Za-z_]", quoted):
            yield from (word for word in re.findall(r"\w+", quoted) if not word[0].isdigit())


def names_of_the_pages() -> set[str]:
    names: set[str] = set()
    for page in PAGES:
        if (SPEC / page).exists():  # the specification is not part of the repository
            text = (SPEC / page).read_text(encoding="utf-8")
            names.update(named_in_prose(text))
            for snippet in snippets(text):
                try:
                    tree = ast.parse(snippet)
                except SyntaxError:  # a signature without a body
                    names.update(re.findall(r"(?:def|type) (\w+)", snippet))
                else:
                    names.update(named_in_code(tree))
    return names


def test_no_name_of_the_pages_is_forgotten() -> None:
    assert names_of_the_pages() - known_names() == set()
