//! `GET /tokenizer_info`: what vLLM's clients ask about the tokenizer.

use axum::Json;
use serde::Serialize;
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::openapi::Error;
use crate::api::select::Model;

/// Properties of the tokenizer, in vLLM's format.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TokenizerInfo {
    /// The name of Hugging Face's generic class for tokenizers of this kind.
    tokenizer_class: &'static str,
    /// The maximum length of a prompt and its answer together, in tokens.
    model_max_length: usize,
    #[schema(required)]
    bos_token: Option<String>,
    #[schema(required)]
    eos_token: Option<String>,
    #[schema(required)]
    chat_template: Option<String>,
}

/// The tokenizer in vLLM's format
#[utoipa::path(
    get,
    path = "/tokenizer_info",
    operation_id = "tokenizerInfo",
    tag = "other formats",
    responses((status = 200, description = "The tokenizer.", body = TokenizerInfo), Error<503>)
)]
pub(in crate::api) async fn tokenizer_info(Model(state): Model) -> Result<Json<TokenizerInfo>, ApiError> {
    let served = state.ready()?;
    let token = |ids: &[u32]| served.tokenizer.special(*ids.first()?).map(str::to_owned);
    Ok(Json(TokenizerInfo {
        tokenizer_class: "PreTrainedTokenizerFast",
        model_max_length: served.limits.context(),
        bos_token: token(served.tokenizer.begin()),
        eos_token: token(served.tokenizer.eos()),
        chat_template: served.template.as_ref().map(|template| template.source().into()),
    }))
}
