//! `GET /openapi.json`: the routes as declared, completed with what all of them share and with this server's limits.

use std::sync::{Arc, OnceLock};

use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::tag::TagBuilder;
use utoipa::openapi::{
    ComponentsBuilder, InfoBuilder, License, OpenApi, OpenApiBuilder, SecurityRequirement, ServerBuilder,
};

use super::errors::{Error, meaning};
use super::finish::finish;
use super::params;
use crate::api::error::{ApiError, ErrorBody};
use crate::api::state::{AppState, Served};
use crate::nearest::nearest;

const ABOUT: &str = "Text generation with models whose memory of the past has a constant size: OpenAI's completions, chat \
                     and responses, and sessions that can be continued, forked, rewound, downloaded and uploaded.";

const TAGS: [(&str, &str); 5] = [
    ("text", "Generate text."),
    ("sessions", "Keep conversations."),
    ("other formats", "Generate text and tokenize in the formats of other servers."),
    ("service", "Models, health and metrics."),
    ("pages", "Pages for browsers."),
];

/// The routes as they are declared, and the JSON that is made from them once the model is loaded.
pub(in crate::api) struct Description {
    routes: &'static Value,
    json: OnceLock<Bytes>,
}

/// Describes the routes as they are declared. `is_public` says which paths need no API key.
pub(in crate::api) fn describe(routes: OpenApi, is_public: impl Fn(&str) -> bool) -> Value {
    let mut document = serde_json::to_value(frame().merge_from(routes)).expect("a description becomes JSON");
    if let Some(paths) = document["paths"].as_object_mut() {
        *paths = std::mem::take(paths).into_iter().map(|(path, item)| complete_path(&path, item, &is_public)).collect();
    }
    document
}

impl Description {
    /// Creates the description from the value that [`describe`] returned.
    pub(in crate::api) fn new(routes: &'static Value) -> Self {
        Self { routes, json: OnceLock::new() }
    }

    /// Returns the route that a client may have meant by `path`.
    pub(in crate::api) fn nearest(&self, path: &str) -> Option<&str> {
        nearest(path, self.routes["paths"].as_object()?.keys().map(String::as_str))
    }

    /// Returns the methods of the route with this pattern.
    pub(in crate::api) fn methods(&self, route: &str) -> String {
        let route = self.routes["paths"][route.replace("{*", "{")].as_object();
        let methods = route.into_iter().flat_map(Map::keys).map(|method| method.to_uppercase());
        let methods: Vec<String> =
            methods.map(|method| if method == "GET" { "GET, HEAD".into() } else { method }).collect();
        methods.join(", ")
    }

    fn json(&self, served: &Served) -> Bytes {
        let json = self.json.get_or_init(|| {
            let mut document = self.routes.clone();
            let limits = [
                ("token_id", served.limits.vocab_size - 1),
                ("max_tokens", served.limits.max_tokens),
                ("prompts", served.engine.queue_capacity()),
                ("prompt_tokens", served.limits.max_prompt_tokens),
            ];
            finish(&mut document, &served.name, limits);
            document.to_string().into()
        });
        json.clone()
    }
}

/// Returns the description without the routes.
fn frame() -> OpenApi {
    let about = "An API key, if the server has keys. Otherwise any value names an owner, and only requests with the same \
                 value see its sessions; requests without a value share one owner.";
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(about)).build();
    let components = ComponentsBuilder::new().security_scheme("bearer", SecurityScheme::Http(bearer));
    let components = components.schema_from::<ErrorBody>().build();
    let info = InfoBuilder::new().title("Tidegate").version(env!("CARGO_PKG_VERSION")).description(Some(ABOUT));
    let tags = TAGS.map(|(name, about)| TagBuilder::new().name(name).description(Some(about)).build());
    let bearer = SecurityRequirement::new::<_, [&str; 0], &str>("bearer", []);
    OpenApiBuilder::new()
        .info(info.license(Some(License::new("MIT OR Apache-2.0"))).build())
        // The URL is relative to the description, so that it is correct behind any proxy path.
        .servers(Some([ServerBuilder::new().url(".").build()]))
        .tags(Some(tags))
        .security(Some([bearer, SecurityRequirement::default()]))
        .components(Some(components))
        .build()
}

/// Adds the parameters, errors and headers that all routes share.
fn complete_path(path: &str, mut item: Value, is_public: impl Fn(&str) -> bool) -> (String, Value) {
    let shared: &[u16] = if is_public(path) { &[500] } else { &[401, 403, 429, 500] };
    for operation in item.as_object_mut().into_iter().flat_map(Map::values_mut) {
        complete_operation(operation, shared);
    }
    // OpenAPI has no syntax for axum's wildcards.
    (path.replace("{*", "{"), item)
}

fn complete_operation(operation: &mut Value, shared: &[u16]) {
    let request_id = serde_json::to_value(params::request_id()).expect("a parameter becomes JSON");
    match operation["parameters"].as_array_mut() {
        Some(parameters) => parameters.push(request_id),
        None => operation["parameters"] = json!([request_id]),
    }
    if let Some(body) = operation.get_mut("requestBody") {
        not_null(body);
    }
    let lists_ignored = operation["requestBody"].is_object() && operation["tags"] != json!(["sessions"]);
    let Some(responses) = operation["responses"].as_object_mut() else { return };
    // The shared errors have the format of the route's other errors.
    let error =
        responses.iter().find(|(status, _)| status.as_str() >= "400").map(|(_, error)| error["content"].clone());
    let error =
        error.unwrap_or_else(|| json!({"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}));
    for status in shared {
        responses.insert(status.to_string(), json!({"description": meaning(*status), "content": error}));
    }
    for (status, response) in responses {
        let schema = response.pointer("/content/application~1json/schema/$ref").and_then(Value::as_str);
        let is_session = schema.is_some_and(|schema| schema.ends_with("/Session") || schema.ends_with("/Appended"));
        let mut header = |name: &str, description: &str| {
            response["headers"][name] = json!({"description": description, "schema": {"type": "string"}});
        };
        if is_session {
            header("etag", "The session's version.");
            header("x-session-version", "The same without quotes.");
        }
        header("x-request-id", "The id of the request in the server's log.");
        match status.as_str() {
            "200" if lists_ignored => {
                header("x-ignored-fields", "Fields that had no effect; absent if there are none.");
            }
            "401" => header("www-authenticate", "How to authenticate."),
            "409" | "429" | "503" => header("retry-after", "Seconds until a retry may succeed."),
            _ => {}
        }
    }
}

/// Removes `null` from the schema of a body. utoipa adds it for an `Option`, but an optional body may only be absent.
fn not_null(body: &mut Value) {
    for content in body["content"].as_object_mut().into_iter().flat_map(Map::values_mut) {
        let options = content["schema"]["oneOf"].as_array();
        let not_null = options.and_then(|options| options.iter().find(|option| !option["$ref"].is_null()));
        if let Some(schema) = not_null.cloned() {
            content["schema"] = schema;
        }
    }
}

/// The API as an OpenAPI description
///
/// It states the limits of this server, so it is not available before the model is loaded.
#[utoipa::path(
    get,
    path = "/openapi.json",
    operation_id = "description",
    tag = "pages",
    responses((status = 200, description = "The description, as OpenAPI 3.1.", body = Object), Error<503>)
)]
pub(in crate::api) async fn description(
    State(state): State<AppState>,
    Extension(description): Extension<Arc<Description>>,
) -> Result<Response, ApiError> {
    let json = description.json(state.for_default().loaded()?);
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}
