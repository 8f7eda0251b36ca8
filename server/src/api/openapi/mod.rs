//! `/openapi.json`: what the API is, made from the code and complete; and `/docs`, a page that shows it.
//!
//! Types with schemas are the wire types themselves where those can be derived from, else those in `schemas`; `routes`
//! has each method of each path. `tests/openapi/` holds all of it to what the server does.

mod docs;
mod finish;
mod route;
mod routes;
mod schemas;
mod written;

use std::sync::{Arc, OnceLock};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use serde_json::Value;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::tag::TagBuilder;
use utoipa::openapi::{
    ComponentsBuilder, InfoBuilder, License, OpenApiBuilder, Paths, SecurityRequirement, ServerBuilder,
};

use super::auth::scope::Access;
use super::error::ApiError;
use super::state::{AppState, Served};
use finish::Bounds;

pub(super) use docs::{file, page};
pub(super) use written::{anything, messages, metadata, nothing, seed, token_ids};

const ABOUT: &str = "Text from a language model whose memory of the past has a constant size, so that conversations \
                     are kept as files: OpenAI's completions, chat and responses, and sessions that are gone on with, \
                     forked, rewound and carried away.";

const TAGS: [(&str, &str); 5] = [
    ("text", "Text is made."),
    ("sessions", "Conversations are kept."),
    ("other formats", "The same for clients of other servers, and tokens."),
    ("service", "What is served, and whether it is."),
    ("pages", "For people."),
];

/// `GET /openapi.json`; the description is made once.
pub(super) fn description() -> MethodRouter<AppState> {
    let made: Arc<OnceLock<Bytes>> = Arc::default();
    get(async move |State(state): State<AppState>| -> Result<Response, ApiError> {
        let served = state.loaded()?;
        let json = made.get_or_init(|| document(served).to_string().into()).clone();
        Ok(([(header::CONTENT_TYPE, route::JSON)], json).into_response())
    })
}

fn document(served: &Served) -> Value {
    let (mut paths, mut components) = (Paths::new(), ComponentsBuilder::new());
    for route in routes::all() {
        let (method, path) = (route.method.clone(), route.path);
        let route = match Access::of(Some(path), &route::standard(&method)) {
            Access::Public => route,
            Access::AnyKey | Access::Scope(_) => route.fails::<schemas::Error>(&[401, 403, 429]),
        };
        let (operation, schemas) = route.build();
        paths.add_path_operation(path, vec![method], operation);
        components = components.schemas_from_iter(schemas);
    }
    let about = "An API key where the server has keys; anything else is the name of an owner, whose sessions nobody \
                 else sees. Without it the owner is everybody.";
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(about)).build();
    let components = components.security_scheme("bearer", SecurityScheme::Http(bearer)).build();
    let license = License::new("MIT OR Apache-2.0");
    let info = InfoBuilder::new().title("Tidegate").version(env!("CARGO_PKG_VERSION")).description(Some(ABOUT));
    let tags = TAGS.map(|(name, about)| TagBuilder::new().name(name).description(Some(about)).build());
    let anybody = SecurityRequirement::default();
    let openapi = OpenApiBuilder::new()
        .info(info.license(Some(license)).build())
        // Beside this file, wherever a proxy has put it.
        .servers(Some([ServerBuilder::new().url(".").build()]))
        .tags(Some(tags))
        .security(Some([SecurityRequirement::new::<_, [&str; 0], &str>("bearer", []), anybody]))
        .components(Some(components))
        .paths(paths)
        .build();
    // Names, texts and numbers: there is nothing in it that JSON cannot say.
    let mut document = serde_json::to_value(openapi).unwrap_or_default();
    let bounds = Bounds {
        model: &served.name,
        vocab_size: served.limits.vocab_size,
        max_tokens: served.limits.max_tokens,
        max_prompts: served.engine.queue_capacity(),
        max_prompt_tokens: served.limits.max_prompt_tokens,
    };
    finish::finish(&mut document, bounds);
    document
}
