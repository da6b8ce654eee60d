"""Traces by OpenTelemetry, if they are asked for: a span of each request.

In:  a request's headers.   Out: a span; headers with which the engine's span becomes its child.

Without it nothing is made, and a client's `traceparent` goes to the engine as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvplug._version import __version__
from kvplug.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# Of the facts of a request, by OpenTelemetry's names where it has some.
_NAMES: Final = {
    "status": "http.response.status_code",
    "method": "http.request.method",
    "path": "url.path",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
}


class Span(Protocol):
    """What is told of one request."""

    def headers(self) -> dict[str, str]:
        """For the engine."""

    def end(self, status: int, facts: Mapping[str, Any]) -> None:
        """The request is over."""


class Tracer(Protocol):
    """begin a span; stop."""

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """A child of the span that the headers name, if they do."""

    def stop(self) -> None:
        """Send what is left."""


class _NoSpan:
    def headers(self) -> dict[str, str]:
        return {}

    def end(self, status: int, facts: Mapping[str, Any]) -> None:
        pass


NO_SPAN: Final[Span] = _NoSpan()


class NoTracer:
    """Makes no spans."""

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """Nothing."""
        return NO_SPAN

    def stop(self) -> None:
        """Nothing to send."""


def tracer_of(endpoint: str | None, environ: Mapping[str, str]) -> Tracer:
    """To this OTLP endpoint (HTTP), or as the standard variables say; ConfigError if OpenTelemetry
    is asked for by `endpoint` and not installed.
    """
    is_named = any(environ.get(name) for name in _ENDPOINTS)
    if endpoint is None and (not is_named or environ.get("OTEL_SDK_DISABLED") == "true"):
        return NoTracer()
    try:
        return OtelTracer(_provider(endpoint))
    except ModuleNotFoundError as error:
        if endpoint is None:
            return NoTracer()  # the variables may be there for others
        raise ConfigError(
            f"otel_endpoint: needs {error.name!r}: pip install 'kvplug[otel]'"
        ) from error


def _provider(endpoint: str | None) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count before this name.
    provider = TracerProvider(resource=Resource.create({"service.name": "kvplug"}))
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


class OtelTracer:
    """Makes spans of a provider, which it stops."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._kind = provider, SpanKind.SERVER
        self._tracer = provider.get_tracer("kvplug", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """A child of the span in `traceparent`, or a root."""
        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        context = self._propagator.extract(carrier)
        span = self._tracer.start_span(name, context=context, kind=self._kind)
        return _OtelSpan(span, self._propagator)

    def stop(self) -> None:
        """Send what is left, for at most the exporter's time limit."""
        self._provider.shutdown()


class _OtelSpan:
    def __init__(self, span: Any, propagator: Any) -> None:  # noqa: ANN401 - types of an extra
        self._span, self._propagator = span, propagator

    def headers(self) -> dict[str, str]:
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=set_span_in_context(self._span))
        return carrier

    def end(self, status: int, facts: Mapping[str, Any]) -> None:
        from opentelemetry.trace import StatusCode

        for name, value in facts.items():
            self._span.set_attribute(_NAMES.get(name, f"kvplug.{name}"), value)
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
