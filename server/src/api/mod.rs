//! HTTP: requests in, JSON and server-sent events out. Only this module serialises.

mod account;
mod aligned;
mod answer;
mod anthropic;
mod auth;
mod chat;
mod choices;
mod completions;
mod constrained;
mod dialect;
mod echo;
mod error;
mod foreign;
mod generate;
mod idempotency;
mod llamacpp;
mod logprobs;
mod metrics;
mod middleware;
mod numbers;
mod openapi;
mod origin;
mod pages;
mod playground;
mod prompt;
mod responses;
mod routes;
mod run;
mod service;
mod sessions;
mod shape;
mod sink;
mod spans;
mod state;
mod streams;
mod texts;
mod tgi;
mod tokens;
mod tools;
mod unsupported;
mod validate;
mod wire;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::Method;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};

use routes::Routes;

pub use auth::keys::{Keys, KeysError};
pub use auth::scope::{Access, Scope};
pub use error::ApiError;
pub use middleware::cors::{Origin, OriginError};
pub use state::{ApiOptions, AppState, Served};

/// Every route. [`Access::of`] says which key each needs.
fn routes() -> Routes {
    Routes::default()
        .route("/", get(playground::index).post(tgi::either))
        .route("/playground/{file}", get(playground::file))
        .route("/favicon.ico", get(playground::favicon))
        .route("/docs", get(openapi::page))
        .route("/docs/{file}", get(openapi::file))
        .route("/openapi.json", openapi::description())
        .route("/v1/completions", post(generate::completions))
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/streams/{id}", get(streams::follow))
        .route("/v1/sessions", get(sessions::list).post(sessions::create))
        .route("/v1/sessions/{id}", get(sessions::get).patch(sessions::patch).delete(sessions::delete))
        .route("/v1/sessions/{id}/append", post(sessions::append))
        .route("/v1/sessions/{id}/fork", post(sessions::fork))
        .route("/v1/sessions/{id}/rewind", post(sessions::rewind))
        .route("/v1/sessions/{id}/turns", get(sessions::turns))
        .route("/v1/sessions/{id}/snapshot", get(sessions::download))
        .route("/v1/snapshots", post(sessions::upload))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/apply-template", post(tokens::apply_template))
        .route("/completion", post(llamacpp::completion))
        .route("/completions", post(llamacpp::completion))
        .route("/infill", post(llamacpp::infill))
        .route("/props", get(llamacpp::props))
        .route("/slots", get(llamacpp::slots))
        .route("/generate", post(tgi::generate))
        .route("/generate_stream", post(tgi::generate_stream))
        .route("/info", get(tgi::info))
        .route("/v1/embeddings", post(tokens::embeddings))
        .route("/embeddings", post(tokens::embeddings))
        .route("/embedding", post(tokens::embeddings))
        .route("/v1/models", get(service::models))
        // A model's name may hold slashes.
        .route("/v1/models/{*id}", get(service::one_model))
        .route("/health", get(service::health))
        .route("/ready", get(service::ready))
        .route("/metrics", get(metrics::scrape))
}

/// The path of every route, as the router takes it, and what reading it needs where the server has keys.
pub fn paths() -> Vec<(&'static str, Access)> {
    routes().paths().iter().map(|path| (*path, Access::of(Some(path), &Method::GET))).collect()
}

/// Every route, with its middleware. Each layer wraps those before it.
pub(crate) fn router(state: AppState) -> Router {
    let options = state.options();
    let router = routes()
        .into_router()
        .fallback(service::not_found)
        .method_not_allowed_fallback(service::method_not_allowed)
        .layer(DefaultBodyLimit::max(options.max_body_bytes))
        .layer(from_fn_with_state(state.clone(), middleware::body_timeout::body_timeout))
        .layer(from_fn_with_state(state.clone(), auth::middleware::authorize))
        .layer(from_fn(middleware::panics::catch_panic));
    let router = if options.cors.is_empty() { router } else { router.layer(middleware::cors::cors(&options.cors)) };
    let router = router.layer(from_fn(middleware::trace::trace)).layer(from_fn_with_state(state.clone(), metrics::count));
    router.layer(from_fn(shape::by_path)).with_state(state)
}
