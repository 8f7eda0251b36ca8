//! HTTP: requests in, JSON and server-sent events out. Only this module serialises.

mod door;
mod error;
mod formats;
mod metrics;
mod openapi;
mod owner;
mod pages;
mod panics;
mod playground;
mod request;
mod run;
mod service;
mod sessions;
mod state;
mod trace;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::Method;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};

use door::Routes;
use formats::anthropic::MessagesRequest;
use formats::chat::ChatRequest;
use formats::completions::CompletionRequest;
use formats::format::generate;
use formats::llamacpp::LlamaRequest;
use formats::responses::ResponseRequest;
use formats::{anthropic, errors, llamacpp, responses, tokens};
use run::resume;

pub use door::{Access, Keys, KeysError, Origin, OriginError, Scope};
pub use error::ApiError;
pub use state::{ApiOptions, AppState, Served};

/// Every route. What each needs of a key is said in [`door`]; a new one needs a key that may generate.
fn routes() -> Routes {
    Routes::default()
        .route("/", get(playground::index))
        .route("/playground/{file}", get(playground::file))
        .route("/favicon.ico", get(playground::favicon))
        .route("/docs", get(openapi::page))
        .route("/docs/{file}", get(openapi::file))
        .route("/openapi.json", openapi::description())
        .route("/v1/completions", post(generate::<CompletionRequest>))
        .route("/v1/chat/completions", post(generate::<ChatRequest>))
        .route("/v1/responses", post(generate::<ResponseRequest>))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/messages", post(generate::<MessagesRequest>))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/streams/{id}", get(resume::resume))
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
        .route("/completion", post(generate::<LlamaRequest>))
        .route("/completions", post(generate::<LlamaRequest>))
        .route("/infill", post(llamacpp::infill))
        .route("/props", get(llamacpp::props))
        .route("/slots", get(llamacpp::slots))
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

/// Every route, over `state`, behind the door. Each layer is around those before it.
pub(crate) fn router(state: AppState) -> Router {
    let options = state.options();
    let router = routes()
        .into_router()
        .fallback(service::not_found)
        .method_not_allowed_fallback(service::method_not_allowed)
        .layer(DefaultBodyLimit::max(options.max_body_bytes))
        .layer(from_fn_with_state(state.clone(), door::in_time))
        .layer(from_fn_with_state(state.clone(), door::guard))
        .layer(from_fn(panics::catch));
    let router = if options.cors.is_empty() { router } else { router.layer(door::cors(&options.cors)) };
    let router = router.layer(from_fn(trace::trace)).layer(from_fn_with_state(state.clone(), metrics::count));
    router.layer(from_fn(errors::in_format_of_path)).with_state(state)
}
