"""OpenTelemetry of a real pool, by the SDK's in-memory exporters, in a program of its own: its providers are global."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json
import sys

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import skyward as sky

spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))


class Broken(SpanProcessor):
    def on_start(self, span, parent_context=None):
        assert span.name != "call unbegun"

    def on_end(self, span):
        assert span.name not in ("call unended", "skyward.pool")


provider.add_span_processor(Broken())
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))


@sky.compute
def inner(number):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    if number < 0:
        raise ValueError("negative")
    with TracerProvider().get_tracer("user").start_as_current_span("inside") as span:
        return span.parent.span_id, span.get_span_context().trace_id


@sky.compute
def unbegun():
    return "unbegun"


@sky.compute
def unended():
    return "unended"


with sky.ComputePool(provider=sky.Local(), nodes=1, display="quiet") as pool:
    with trace.get_tracer("user").start_as_current_span("mine"):
        parent, _ = inner(1) >> pool
    everywhere = inner(2) @ pool
    despite = [pool.submit(unbegun).result(60), pool.submit(unended).result(60)]
    try:
        inner(-1) >> pool
    except ValueError:
        pass

values = {
    metric.name: [point.value if hasattr(point, "value") else point.count for point in metric.data.data_points]
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
}
found = [json.loads(span.to_json()) for span in spans.get_finished_spans()]
ids = [f"0x{parent:016x}", f"0x{everywhere[0][0]:016x}"]
print(json.dumps({"spans": found, "metrics": values, "despite": despite, "inside": ids}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=tmp_path_factory.mktemp("program"),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def named(told: dict[str, Any], name: str) -> Sequence[dict[str, Any]]:
    return [span for span in told["spans"] if span["name"] == name]


def test_launch_and_bootstrap_are_steps_of_the_pools_span(told: dict[str, Any]) -> None:
    (pool,), (launch,), (bootstrap,) = (named(told, f"skyward.{each}") for each in ("pool", "launch", "bootstrap"))

    assert launch["parent_id"] == bootstrap["parent_id"] == pool["context"]["span_id"]
    assert pool["attributes"]["skyward.provider"] == launch["attributes"]["skyward.provider"] == "local"
    assert (pool["attributes"]["skyward.nodes"], launch["attributes"]["skyward.node"]) == (1, 0)
    assert pool["attributes"]["skyward.cost.usd"] == 0
    assert launch["attributes"]["skyward.instance"] == bootstrap["attributes"]["skyward.instance"]
    assert bootstrap["status"]["status_code"] == "OK"


def test_calls_are_children_of_the_callers_span_and_parents_of_theirs(told: dict[str, Any]) -> None:
    (mine,), (pool,) = named(told, "mine"), named(told, "skyward.pool")
    first, broadcast, failed = named(told, "call inner")

    assert [call["parent_id"] for call in (first, broadcast, failed)] == [
        mine["context"]["span_id"],
        pool["context"]["span_id"],
        pool["context"]["span_id"],
    ]
    assert told["inside"] == [first["context"]["span_id"], broadcast["context"]["span_id"]]


def test_a_calls_span_has_its_place_times_bytes_and_outcome(told: dict[str, Any]) -> None:
    first, _, failed = named(told, "call inner")
    said = first["attributes"]

    assert (said["skyward.call.name"], said["skyward.node"], said["skyward.worker"]) == ("inner#0", 0, 0)
    assert said["skyward.call.outcome"] == "ok"
    assert 0 < said["skyward.call.worker_s"] < 60
    assert 0 <= said["skyward.call.queue_s"] < 60
    assert said["skyward.call.sent_bytes"] > 0
    assert said["skyward.call.received_bytes"] > 0
    assert failed["attributes"]["skyward.call.outcome"] == "error"
    assert failed["attributes"]["error.type"] == "builtins.ValueError"
    assert failed["status"] == {"status_code": "ERROR", "description": "negative"}


def test_metrics_count_calls_by_their_outcome(told: dict[str, Any]) -> None:
    assert sorted(told["metrics"]["skyward.calls"]) == [1, 1, 2]
    assert told["metrics"]["skyward.calls.queued"] == [0]
    assert sum(told["metrics"]["skyward.call.duration"]) == 4
    assert told["metrics"]["skyward.pool.cost"] == [0]


def test_a_processor_of_spans_that_raises_costs_no_call_and_no_pool(told: dict[str, Any]) -> None:
    assert told["despite"] == ["unbegun", "unended"]


@pytest.mark.parametrize("prelude", ["", "import opentelemetry.trace"])
def test_a_program_that_configures_none_has_none(prelude: str, tmp_path: Path) -> None:
    program = f"""
import sys
{prelude}
from skyward.api.telemetry import open_telemetry

print(open_telemetry("p", "local", None, None, None), "opentelemetry.propagate" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
    )

    assert done.stdout.split() == ["None", "False"]
