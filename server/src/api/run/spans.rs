//! OpenTelemetry spans: one for each request, with the phases of its texts as children. The parent is the span that
//! `traceparent` names, if the request has that header. Without an exporter, spans are empty and cost nothing. Spans
//! never contain a client's text.

use std::time::{Duration, SystemTime};

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, StatusCode};
use opentelemetry::propagation::Extractor;
use opentelemetry::trace::{Span, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value, global};

use super::encoder::TokenUsage;
use crate::engine::{Failure, Finish, FinishReason, Timings};

/// The name of the instrumentation scope.
const SCOPE: &str = "tidegate";

/// A reader of the W3C trace context headers.
struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(axum::http::HeaderName::as_str).collect()
    }
}

/// Opens the span of a request, in the trace that its `traceparent` names. The span ends with the last clone of the
/// context.
pub(in crate::api) fn begin(request: &Request, id: &str) -> Context {
    let headers = Headers(request.headers());
    let parent =
        global::get_text_map_propagator(|propagator| propagator.extract_with_context(&Context::new(), &headers));
    let route = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let method = request.method().as_str();
    let tracer = global::tracer(SCOPE);
    let builder = tracer.span_builder(format!("{method} {route}").trim_end().to_owned()).with_kind(SpanKind::Server);
    let context = parent.with_span(builder.start_with_context(&tracer, &parent));
    let span = context.span();
    if span.is_recording() {
        span.set_attribute(KeyValue::new("http.request.method", method.to_owned()));
        span.set_attribute(KeyValue::new("url.path", request.uri().path().to_owned()));
        span.set_attribute(KeyValue::new("tidegate.request_id", id.to_owned()));
        if !route.is_empty() {
            span.set_attribute(KeyValue::new("http.route", route.to_owned()));
        }
        if let Some(operation) = operation(route) {
            span.set_attribute(KeyValue::new("gen_ai.operation.name", operation));
            span.set_attribute(KeyValue::new("gen_ai.provider.name", "tidegate"));
        }
    }
    context
}

/// Returns the operation of a route that generates, named as in the semantic conventions for generative AI.
fn operation(route: &str) -> Option<&'static str> {
    match route {
        "/v1/chat/completions" | "/chat/completions" | "/v1/messages" | "/v1/responses" | "/responses" => Some("chat"),
        "/v1/completions" | "/completion" | "/completions" => Some("text_completion"),
        _ => None,
    }
}

/// Records the response's status.
pub(in crate::api) fn answered(context: &Context, status: StatusCode) {
    let span = context.span();
    span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
    if status.is_server_error() {
        span.set_status(Status::error(""));
    }
}

/// Records a text that has ended, with a span each for queue, prefill and decode.
pub(in crate::api) fn text(context: &Context, finish: &Finish) {
    if !context.span().is_recording() {
        return;
    }
    let tracer = global::tracer(SCOPE);
    let reason = match finish.reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Interrupted => "interrupted",
    };
    let reasons = Value::Array(Array::String(vec![StringValue::from(reason)]));
    let Timings { queue, prefill, decode, .. } = finish.timings;
    let end = SystemTime::now();
    let before = |moment: SystemTime, duration: Duration| moment.checked_sub(duration).unwrap_or(moment);
    let first_token = before(end, decode);
    let admitted = before(first_token, prefill);
    let tokens = |name, count: usize| KeyValue::new(name, count as i64);
    let phases = [
        ("queue", before(admitted, queue), admitted, vec![]),
        ("prefill", admitted, first_token, vec![tokens("gen_ai.usage.input_tokens", finish.prompt_tokens)]),
        (
            "decode",
            first_token,
            end,
            vec![
                tokens("gen_ai.usage.output_tokens", finish.completion_tokens),
                KeyValue::new("gen_ai.response.finish_reasons", reasons),
            ],
        ),
    ];
    for (name, from, to, attributes) in phases {
        let builder = tracer.span_builder(name).with_start_time(from).with_attributes(attributes);
        builder.start_with_context(&tracer, context).end_with_timestamp(to);
    }
}

/// Records the end of a request, with its failure if it had one.
pub(in crate::api) fn done(context: &Context, usage: &TokenUsage, failure: Option<Failure>) {
    let span = context.span();
    if !span.is_recording() {
        return;
    }
    for (name, tokens) in [
        ("gen_ai.usage.input_tokens", usage.prompt),
        ("gen_ai.usage.output_tokens", usage.completion),
        ("gen_ai.usage.cache_read.input_tokens", usage.cached),
    ] {
        span.set_attribute(KeyValue::new(name, tokens as i64));
    }
    if let Some(failure) = failure {
        span.set_attribute(KeyValue::new("error.type", format!("{failure:?}")));
        span.set_status(Status::error(failure.to_string()));
    }
}
