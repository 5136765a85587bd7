"""OpenTelemetry of a pool: spans and metrics from its events and call records, and trace context into its calls.

Only a program that has configured OpenTelemetry has either: without a provider of spans or metrics in this process,
nothing is imported, and a call costs three comparisons more.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec

from skyward import events as ev
from skyward.errors import PoolStateError
from skyward.events.bus import EventBus
from skyward.request.request import PoolRequest
from skyward.scheduling.calls import LiveCall, RawOutcome
from skyward.scheduling.dispatch_and_retries import WorkerId
from skyward.wire.messages import CallHeader, PackedError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

P = ParamSpec("P")

_logger = logging.getLogger("skyward")
_SCOPE = "skyward"


def _costs_no_call(record: Callable[P, None]) -> Callable[P, None]:
    """Decorate a function that runs the program's processors and samplers: their errors are logged, not raised."""

    @functools.wraps(record)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(*args, **kwargs)
        except Exception:
            _logger.exception("OpenTelemetry as this program has configured it raised an error")

    return guarded


def open_telemetry(
    pool_id: str, provider: str, request: PoolRequest, bus: EventBus, closing: ExitStack
) -> PoolTelemetry | None:
    """Record the pool that opens here and now until ``closing``; return None where the program configured nothing."""
    if "opentelemetry" not in sys.modules or not _is_configured():
        return None
    attributes = {
        "skyward.pool.id": pool_id,
        "skyward.provider": provider,
        "skyward.nodes": request.nodes,
        "skyward.workers_per_node": request.workers_per_node,
    }
    telemetry = PoolTelemetry(attributes)
    bus.subscribe(None, telemetry.take)
    closing.callback(telemetry.close)
    return telemetry


def _is_configured() -> bool:
    from opentelemetry import metrics, trace

    sources = (trace.get_tracer_provider(), metrics.get_meter_provider())
    # Proxies and providers of nothing are the interface's own.
    return any(
        not type(source).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics")) for source in sources
    )


class PoolTelemetry:
    """Spans and metrics of one pool.

    Args:
        attributes: attributes of the pool's span; those of every call hold the pool's id and provider as well.
    """

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        from opentelemetry import metrics, trace

        self._trace = trace
        self._tracer = trace.get_tracer(_SCOPE)
        meter = metrics.get_meter(_SCOPE)
        self.place = {name: attributes[name] for name in ("skyward.pool.id", "skyward.provider")}
        self.calls = meter.create_counter("skyward.calls", "{call}", "Calls that have ended")
        self.queued = meter.create_up_down_counter("skyward.calls.queued", "{call}", "Calls not yet sent to a worker")
        self.queue_time = meter.create_histogram("skyward.call.queue_time", "s", "Time from submission to the worker")
        self.duration = meter.create_histogram("skyward.call.duration", "s", "Time on the worker")
        self._cost = meter.create_gauge("skyward.pool.cost", "{USD}", "Cost of the pool so far")
        self._pool = self._tracer.start_span("skyward.pool", attributes=attributes)
        self._within = trace.set_span_in_context(self._pool)
        self._steps: dict[str, Span] = {}
        self._launching: tuple[int, ev.InstanceLaunching] | None = None

    @_costs_no_call
    def begin(self, call: LiveCall) -> None:
        """Start the span of a submitted call, below the caller's span or else the pool's; send its context along."""
        from opentelemetry import propagate

        has_parent = self._trace.get_current_span().get_span_context().is_valid
        function = call.label.rpartition(".")[2]
        span = self._tracer.start_span(
            f"call {function}", None if has_parent else self._within, self._trace.SpanKind.CLIENT
        )
        if span.is_recording():
            span.set_attributes({**self.place, "skyward.call.name": call.name, "skyward.call.function": function})
        carrier: dict[str, str] = {}
        propagate.inject(carrier, self._trace.set_span_in_context(span))
        call.header = replace(call.header or CallHeader(), trace=carrier)
        call.trace = _CallSpan(self, span, {**self.place, "skyward.call.function": function})
        self.queued.add(1, self.place)

    def take(self, event: ev.SkywardEvent) -> None:
        """Follow the pool's events; a callback of its bus."""
        match event:
            case ev.InstanceLaunching():
                self._launching = time.time_ns(), event
            case ev.InstanceProvisioned():
                self._launched(event)
            case ev.BootstrapStarting():
                self._steps[event.instance_id] = self._tracer.start_span(
                    "skyward.bootstrap", self._within, attributes={**self.place, "skyward.instance": event.instance_id}
                )
            case ev.BootstrapProgress() if (step := self._steps.get(event.instance_id)) is not None:
                step.add_event(event.step)
            case ev.BootstrapCompleted() | ev.InstanceStopping() if step := self._steps.pop(event.instance_id, None):
                step.set_status(_status(ok=isinstance(event, ev.BootstrapCompleted)))
                step.end()
            case ev.CostUpdate():
                self._cost.set(event.accumulated_cost, self.place)
            case ev.CostFinal():
                self._cost.set(event.total_cost, self.place)
                self._pool.set_attribute("skyward.cost.usd", event.total_cost)
            case ev.WorkerLost() | ev.InstancePreempted() | ev.Error():
                known = {f"skyward.{name}": value for name, value in vars(event).items() if value is not None}
                self._pool.add_event(type(event).__name__, known)
            case _:
                pass

    @_costs_no_call
    def close(self) -> None:
        """End the spans that are still open, the pool's last. Idempotent."""
        for step in self._steps.values():
            step.end()
        self._steps.clear()
        self._pool.end()

    def _launched(self, event: ev.InstanceProvisioned) -> None:
        began, order = self._launching or (time.time_ns(), None)
        attributes = {
            **self.place,
            "skyward.instance": event.instance_id,
            "skyward.instance.type": event.instance_type or "",
            "skyward.node": event.node,
            "skyward.spot": event.spot,
        }
        if order is not None and order.price_per_hour is not None:
            attributes["skyward.price_per_hour.usd"] = order.price_per_hour
        self._tracer.start_span("skyward.launch", self._within, attributes=attributes, start_time=began).end()


class _CallSpan:
    """Span of one call. Used by the caller's thread, then by the event loop."""

    __slots__ = ("_labels", "_pool", "_queue_s", "_span", "_submitted")

    def __init__(self, pool: PoolTelemetry, span: Span, labels: dict[str, str]) -> None:
        self._pool = pool
        self._span = span
        self._labels = labels
        self._submitted = time.perf_counter()
        self._queue_s: float | None = None

    @_costs_no_call
    def sent(self, worker: WorkerId) -> None:
        self._span.add_event("sent", {"skyward.node": worker.node, "skyward.worker": worker.worker})
        if self._queue_s is None:
            self._queue_s = time.perf_counter() - self._submitted
            self._pool.queued.add(-1, self._pool.place)
            self._pool.queue_time.record(self._queue_s, self._labels)

    @_costs_no_call
    def ended(self, call: LiveCall, raw: RawOutcome) -> None:
        outcome, kind, message = _outcome(raw.error)
        labels = {**self._labels, "skyward.call.outcome": outcome}
        if self._span.is_recording():
            self._span.set_attributes({**labels, **_measures(call, raw, self._queue_s)})
            if outcome == "error":
                self._span.set_attribute("error.type", kind)
            self._span.set_status(_status(ok=outcome == "ok", why=message))
        self._pool.calls.add(1, labels)
        if self._queue_s is None:
            self._pool.queued.add(-1, self._pool.place)
        if raw.seconds is not None:
            self._pool.duration.record(raw.seconds, labels)
        self._span.end()


def _outcome(error: PackedError | Exception | None) -> tuple[str, str, str]:
    """Return ``ok``, ``error`` or ``cancelled``, the error's type, and its first line."""
    match error:
        case None:
            return "ok", "", ""
        case PackedError():
            return "error", error.type_name, error.message.partition("\n")[0]
        case CancelledError() | PoolStateError():
            return "cancelled", "", "cancelled"
        case _:
            return "error", type(error).__qualname__, str(error).partition("\n")[0]


def _measures(call: LiveCall, raw: RawOutcome, queue_s: float | None) -> dict[str, Any]:
    sent = len(call.data) + (len(call.arguments.data) if call.arguments else 0)
    sent += sum(blob.view.nbytes for blob in call.blobs if not blob.of_function)
    measures: dict[str, Any] = {
        "skyward.call.sent_bytes": sent,
        "skyward.call.received_bytes": len(raw.data) + sum(memoryview(buffer).nbytes for buffer in raw.buffers),
    }
    if queue_s is not None:
        measures["skyward.call.queue_s"] = queue_s
    if raw.seconds is not None:
        measures["skyward.call.worker_s"] = raw.seconds
    if raw.worker is not None:
        measures |= {"skyward.node": raw.worker.node, "skyward.worker": raw.worker.worker}
    return measures


def _status(*, ok: bool, why: str = "") -> Any:
    from opentelemetry.trace import Status, StatusCode

    return Status(StatusCode.OK) if ok else Status(StatusCode.ERROR, why)
