//! Every route, with the access that it needs. Each handler declares its own path, method and schemas.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::Router;
use serde_json::Value;
use utoipa::openapi::path::Paths;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};
use utoipa_axum::routes;

use super::auth::scope::{Access, Scope};
use super::formats::{anthropic, input_tokens, llamacpp, responses, tokenizer_info, tokens};
use super::openapi::document;
use super::run::resume;
use super::state::AppState;
use super::{generation, metrics, pages, service, sessions};

/// The routes, and the access that each path needs.
pub(super) struct Routes {
    pub(super) router: Router<AppState>,
    pub(super) access: BTreeMap<String, Access>,
    /// The OpenAPI description of the routes, without the parts that depend on the model.
    pub(super) description: Value,
}

/// The routes and their description, built once per process.
pub(super) static ROUTES: LazyLock<Routes> = LazyLock::new(|| {
    let public = OpenApiRouter::new()
        .routes(routes!(pages::playground))
        .routes(routes!(pages::playground_file))
        .routes(routes!(pages::favicon))
        .routes(routes!(pages::docs))
        .routes(routes!(pages::docs_file))
        .routes(routes!(document::description))
        .routes(routes!(service::alive))
        .routes(routes!(service::health))
        .routes(routes!(service::ready));
    let generate = OpenApiRouter::new()
        .routes(routes!(generation::completions))
        .routes(routes!(generation::chat))
        .routes(alias("/chat/completions", "llamaChatCompletions", routes!(generation::chat)))
        .routes(routes!(generation::create_response))
        .routes(alias("/responses", "llamaResponses", routes!(generation::create_response)))
        .routes(routes!(generation::create_message))
        .routes(routes!(anthropic::count_tokens))
        .routes(routes!(input_tokens::of_response))
        .routes(routes!(input_tokens::of_chat))
        .routes(alias("/chat/completions/input_tokens", "llamaCountTokens", routes!(input_tokens::of_chat)))
        .routes(routes!(tokens::tokenize))
        .routes(routes!(tokens::detokenize))
        .routes(routes!(tokens::apply_template))
        .routes(routes!(tokenizer_info::tokenizer_info))
        .routes(routes!(tokens::embeddings))
        .routes(alias("/embeddings", "llamaEmbeddings", routes!(tokens::embeddings)))
        .routes(alias("/embedding", "embedding", routes!(tokens::embeddings)))
        .routes(routes!(generation::llama_completion))
        .routes(alias("/completions", "llamaCompletions", routes!(generation::llama_completion)))
        .routes(routes!(llamacpp::infill))
        .routes(routes!(llamacpp::props))
        .routes(routes!(llamacpp::slots))
        .routes(routes!(service::models))
        .routes(alias("/models", "llamaModels", routes!(service::models)))
        .routes(routes!(service::one_model));
    let sessions = sessions::routes()
        .routes(routes!(responses::retrieve, responses::delete))
        .routes(routes!(resume::resume, resume::end))
        .routes(routes!(llamacpp::slots::act))
        .routes(routes!(llamacpp::slots::export, llamacpp::slots::import));
    let metrics = OpenApiRouter::new().routes(routes!(metrics::scrape));

    let groups = [
        (Access::Public, public),
        (Access::Scope(Scope::Generate), generate),
        (Access::Scope(Scope::Sessions), sessions),
        (Access::Scope(Scope::Metrics), metrics),
    ];
    let (mut router, mut access) = (OpenApiRouter::default(), BTreeMap::new());
    for (needed, group) in groups {
        access.extend(group.get_openapi().paths.paths.keys().map(|path| (path.clone(), needed)));
        router = router.merge(group);
    }
    let (router, openapi) = router.split_for_parts();
    let description = document::describe(openapi, |path| access.get(path) == Some(&Access::Public));
    Routes { router, access, description }
});

/// Returns the route under another path, with another operation id.
fn alias(
    path: &str,
    id: &str,
    (schemas, paths, handlers): UtoipaMethodRouter<AppState>,
) -> UtoipaMethodRouter<AppState> {
    let mut aliases = Paths::new();
    for (_, mut item) in paths.paths {
        for operation in [&mut item.get, &mut item.post].into_iter().flatten() {
            operation.operation_id = Some(id.to_owned());
        }
        aliases.paths.insert(path.to_owned(), item);
    }
    (schemas, aliases, handlers)
}
