//! How a route is described: one method of one path, with what it takes and what it gives.

use axum::http::Method;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa::openapi::example::ExampleBuilder;
use utoipa::openapi::path::{Operation, OperationBuilder, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{AnyOfBuilder, KnownFormat, ObjectBuilder, SchemaFormat, Type};
use utoipa::openapi::{
    Content, ContentBuilder, HeaderBuilder, HttpMethod, Ref, RefOr, Required, ResponseBuilder, Schema,
};

/// A type's name and its schema.
pub(super) type Named = (String, RefOr<Schema>);

pub(super) const JSON: &str = "application/json";
const STREAM: &str = "text/event-stream";
pub(super) const BYTES: &str = "application/octet-stream";

/// A method as HTTP has it.
pub(super) fn standard(method: &HttpMethod) -> Method {
    match method {
        HttpMethod::Post => Method::POST,
        HttpMethod::Patch => Method::PATCH,
        HttpMethod::Delete => Method::DELETE,
        // There are no others here.
        _ => Method::GET,
    }
}

/// One method of one path.
pub(super) struct Route {
    pub(super) method: HttpMethod,
    pub(super) path: &'static str,
    operation: OperationBuilder,
    /// The answers, each status once; a status may have several types of content.
    answers: Vec<(u16, ResponseBuilder)>,
    /// The types that it names.
    schemas: Vec<Named>,
}

impl Route {
    pub(super) fn new(method: HttpMethod, path: &'static str, id: &str, summary: &str) -> Self {
        let operation = OperationBuilder::new().operation_id(Some(id)).summary(Some(summary));
        Self { method, path, operation, answers: Vec::new(), schemas: Vec::new() }
    }

    pub(super) fn get(path: &'static str, id: &str, summary: &str) -> Self {
        Self::new(HttpMethod::Get, path, id, summary)
    }

    pub(super) fn post(path: &'static str, id: &str, summary: &str) -> Self {
        Self::new(HttpMethod::Post, path, id, summary)
    }

    pub(super) fn delete(path: &'static str, id: &str, summary: &str) -> Self {
        Self::new(HttpMethod::Delete, path, id, summary)
    }

    /// Which part of the API it belongs to.
    pub(super) fn tag(mut self, tag: &str) -> Self {
        self.operation = self.operation.tag(tag);
        self
    }

    /// What there is to know beside the summary.
    pub(super) fn says(mut self, description: &str) -> Self {
        self.operation = self.operation.description(Some(description));
        self
    }

    /// Parameters in the path, the query and the headers.
    pub(super) fn with(mut self, parameters: impl IntoIterator<Item = Parameter>) -> Self {
        for parameter in parameters {
            self.operation = self.operation.parameter(parameter);
        }
        self
    }

    /// A body of JSON, with examples by their names.
    pub(super) fn takes<T: ToSchema>(self, required: bool, examples: &[(&str, Value)]) -> Self {
        let examples = examples.iter().map(|(name, value)| {
            let example = ExampleBuilder::new().value(Some(value.clone())).build();
            ((*name).to_owned(), RefOr::T(example))
        });
        let content = ContentBuilder::new().schema(Some(named::<T>())).examples_from_iter(examples).build();
        self.note::<T>().takes_content(JSON, content, required)
    }

    /// A body of bytes.
    pub(super) fn takes_bytes(self) -> Self {
        self.takes_content(BYTES, bytes(), true)
    }

    fn takes_content(mut self, kind: &str, content: Content, required: bool) -> Self {
        let required = if required { Required::True } else { Required::False };
        let body = RequestBodyBuilder::new().content(kind, content).required(Some(required)).build();
        self.operation = self.operation.request_body(Some(body));
        self
    }

    /// An answer of JSON.
    pub(super) fn gives<T: ToSchema>(self, status: u16, description: &str) -> Self {
        self.note::<T>().answers(status, description, JSON, Content::new(Some(named::<T>())))
    }

    /// An answer of server-sent events whose data are of the type `T`, beside another of the same status. Each event is
    /// an object here, with the names that it has as one in a browser.
    pub(super) fn streams<T: ToSchema>(self, description: &str) -> Self {
        let text = || ObjectBuilder::new().schema_type(Type::String);
        let end = text().enum_values(Some(["[DONE]"]));
        let data = text().content_media_type(JSON).content_schema(Some(named::<T>()));
        let data = AnyOfBuilder::new().item(data).item(end).build();
        let event = ObjectBuilder::new()
            .schema_type(Type::Object)
            .description(Some(description))
            .property("data", Schema::AnyOf(data))
            .required("data")
            .property("event", text())
            .property("id", text())
            .build();
        self.note::<T>().on(200, |answer| answer.content(STREAM, Content::new(Some(event))))
    }

    fn note<T: ToSchema>(mut self) -> Self {
        T::schemas(&mut self.schemas);
        self.schemas.push((T::name().into_owned(), T::schema()));
        self
    }

    /// An answer of text or bytes of some other kind.
    pub(super) fn gives_text(self, status: u16, description: &str, kind: &str) -> Self {
        let text = ObjectBuilder::new().schema_type(Type::String).build();
        let content = if kind == BYTES { bytes() } else { Content::new(Some(text)) };
        self.answers(status, description, kind, content)
    }

    /// The same answer as another kind of text.
    pub(super) fn or_text(self, status: u16, kind: &str) -> Self {
        let text = ObjectBuilder::new().schema_type(Type::String).build();
        self.on(status, |answer| answer.content(kind, Content::new(Some(text))))
    }

    /// An answer without a body.
    pub(super) fn gives_nothing(mut self, status: u16, description: &str) -> Self {
        self.answers.push((status, ResponseBuilder::new().description(description)));
        self
    }

    fn answers(mut self, status: u16, description: &str, kind: &str, content: Content) -> Self {
        self.answers.push((status, ResponseBuilder::new().description(description).content(kind, content)));
        self
    }

    /// A header of an answer that is described already.
    pub(super) fn header(self, status: u16, name: &str, description: &str) -> Self {
        let text = ObjectBuilder::new().schema_type(Type::String).build();
        let header = HeaderBuilder::new().schema(Some(text)).description(Some(description)).build();
        self.on(status, |answer| answer.header(name, header))
    }

    fn on(mut self, status: u16, change: impl FnOnce(ResponseBuilder) -> ResponseBuilder) -> Self {
        let at = self.answers.iter().position(|(known, _)| *known == status);
        let (_, mut answer) = at.map_or_else(|| (status, ResponseBuilder::new()), |at| self.answers.remove(at));
        answer = change(answer);
        self.answers.push((status, answer));
        self
    }

    /// Refusals of the type `T`; those that are there already stay.
    pub(super) fn fails<T: ToSchema>(self, statuses: &[u16]) -> Self {
        let noted = self.note::<T>();
        statuses.iter().fold(noted, |route, status| {
            if route.answers.iter().any(|(known, _)| known == status) {
                return route;
            }
            let content = Content::new(Some(named::<T>()));
            let route = route.answers(*status, refusal(*status), JSON, content);
            match status {
                401 => route.header(*status, "www-authenticate", "How to show a key."),
                409 | 429 | 503 => {
                    route.header(*status, "retry-after", "Seconds after which it may be worth trying again.")
                }
                _ => route,
            }
        })
    }

    /// The operation, and the types that it names.
    pub(super) fn build(mut self) -> (Operation, Vec<Named>) {
        self.answers.sort_by_key(|(status, _)| *status);
        let id = "The id of the request in the server's log: the one that was sent, or a new one.";
        let header = ObjectBuilder::new().schema_type(Type::String).build();
        let header = HeaderBuilder::new().schema(Some(header)).description(Some(id)).build();
        let mut operation = self.operation.parameter(request_id());
        for (status, answer) in self.answers {
            let answer = answer.header("x-request-id", header.clone()).build();
            operation = operation.response(status.to_string(), answer);
        }
        (operation.build(), self.schemas)
    }
}

fn named<T: ToSchema>() -> Ref {
    Ref::from_schema_name(T::name())
}

fn bytes() -> Content {
    let format = Some(SchemaFormat::KnownFormat(KnownFormat::Binary));
    Content::new(Some(ObjectBuilder::new().schema_type(Type::String).format(format).build()))
}

/// What a status means, wherever it comes.
fn refusal(status: u16) -> &'static str {
    match status {
        400 => "A parameter is wrong; `param` names it, and the message its bound.",
        401 => "No key that this server knows came with the request.",
        403 => "The caller has used up what it may keep, or its key may not do this.",
        404 => "There is no such thing, or it is another caller's.",
        408 => "The request took longer than this server allows, or its client read nothing for too long.",
        409 => "The session is in use, or a request with the same `idempotency-key` is running.",
        410 => "The events that were asked for are no longer kept.",
        412 => "The session has another version by now than `if-match` says.",
        413 => "The body is longer than this server takes.",
        415 => "The body has another content type than the one that is asked for.",
        422 => "The `idempotency-key` was used for another request.",
        429 => "The queue is full, too many wait for sessions, or the key has had enough for now.",
        500 => "The server failed on this request.",
        501 => "This server has not what it takes: no store, no secret, or a limit that is too low.",
        503 => "The model is being loaded, or the server is shutting down.",
        _ => "There is no room left for what is to be kept.",
    }
}

fn parameter(at: ParameterIn, name: &str, description: &str, schema: impl Into<RefOr<Schema>>) -> Parameter {
    let required = if matches!(at, ParameterIn::Path) { Required::True } else { Required::False };
    let parameter = ParameterBuilder::new().name(name).parameter_in(at).required(required);
    parameter.description(Some(description)).schema(Some(schema)).build()
}

/// A word in the path.
pub(super) fn in_path(name: &str, description: &str) -> Parameter {
    let word = ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).build();
    parameter(ParameterIn::Path, name, description, word)
}

/// A value in the query.
pub(super) fn in_query(name: &str, description: &str, schema: impl Into<RefOr<Schema>>) -> Parameter {
    parameter(ParameterIn::Query, name, description, schema)
}

/// A header whose values match `pattern`.
fn in_header(name: &str, description: &str, pattern: &str) -> Parameter {
    let text = ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern)).build();
    parameter(ParameterIn::Header, name, description, text)
}

fn request_id() -> Parameter {
    let text = "Names the request in the server's log: up to 128 letters, digits and `-`, `_`, `.`; anything else is \
                replaced by an id of the server's.";
    let schema = ObjectBuilder::new().schema_type(Type::String).build();
    parameter(ParameterIn::Header, "x-request-id", text, schema)
}

/// The key of a request that may be sent again.
pub(super) fn idempotency_key() -> Parameter {
    let text = "The same request sent again with the same key gives the first result, and does not happen twice.";
    in_header("idempotency-key", text, "^[!-~]{1,255}$")
}

/// The version that the session of the path must have.
pub(super) fn if_match() -> Parameter {
    let text = "The version that the session must have, as its `etag` says it; `*` is any.";
    parameter(ParameterIn::Header, "if-match", text, ObjectBuilder::new().schema_type(Type::String).build())
}

/// The version that the session of the body must have, where there is one.
pub(super) fn if_match_of_body() -> Parameter {
    let text = "With `session`: the version that the session must have, as its `etag` says it; `*` is any.";
    parameter(ParameterIn::Header, "if-match", text, ObjectBuilder::new().schema_type(Type::String).build())
}

/// How long to wait for a session.
pub(super) fn prefer() -> Parameter {
    let text = "`wait=SECONDS`: how long to wait where the session is in use, at most 600 (RFC 7240); not at all where \
                nothing is said.";
    parameter(ParameterIn::Header, "prefer", text, ObjectBuilder::new().schema_type(Type::String).build())
}

/// The event after which a stream is taken up again.
pub(super) fn last_event_id() -> Parameter {
    in_header("last-event-id", "The number of the last event that has been read.", "^[0-9]{1,15}$")
}
