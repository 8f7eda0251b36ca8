//! Requests as OpenTelemetry spans: one for each, below its caller's where the request names one, with the phases of
//! its texts below it. Where nothing is exported, spans are empty and cost nothing. No text of any client is in them.

use std::time::{Duration, SystemTime};

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, StatusCode};
use opentelemetry::propagation::Extractor;
use opentelemetry::trace::{Span, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value, global};

use crate::api::formats::openai::answer::Usage;
use crate::engine::{Failure, Finish, FinishReason, Timings};

/// The instrumentation's name.
const SCOPE: &str = "tidegate";

/// The headers of W3C's trace context.
struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(axum::http::HeaderName::as_str).collect()
    }
}

/// The span of a request, which goes on in the trace that its `traceparent` names. It ends with the last copy of what
/// is returned here.
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

/// What the routes that generate do, in the words of the semantic conventions for generative AI.
fn operation(route: &str) -> Option<&'static str> {
    match route {
        "/v1/chat/completions" | "/v1/messages" | "/v1/responses" => Some("chat"),
        "/v1/completions" | "/completion" => Some("text_completion"),
        _ => None,
    }
}

/// The answer starts.
pub(in crate::api) fn answered(context: &Context, status: StatusCode) {
    let span = context.span();
    span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
    if status.is_server_error() {
        span.set_status(Status::error(""));
    }
}

/// A text has ended: its time in the queue, in the prompt and in the answer, as spans of their own.
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
    let Timings { queue, prefill, decode } = finish.timings;
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

/// All texts have ended, by a failure or not.
pub(in crate::api) fn done(context: &Context, usage: &Usage, failure: Option<Failure>) {
    let span = context.span();
    if !span.is_recording() {
        return;
    }
    let cached = usage.prompt_tokens_details.cached_tokens;
    for (name, tokens) in [
        ("gen_ai.usage.input_tokens", usage.prompt_tokens),
        ("gen_ai.usage.output_tokens", usage.completion_tokens),
        ("gen_ai.usage.cache_read.input_tokens", cached),
    ] {
        span.set_attribute(KeyValue::new(name, tokens as i64));
    }
    if let Some(failure) = failure {
        span.set_attribute(KeyValue::new("error.type", format!("{failure:?}")));
        span.set_status(Status::error(failure.to_string()));
    }
}
