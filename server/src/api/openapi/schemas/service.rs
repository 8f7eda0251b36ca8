//! Models, health, and refusals.

use serde_json::Value;
use utoipa::ToSchema;

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum ListKind {
    List,
}

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum ModelKind {
    Model,
}

/// A model that is served.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Model {
    id: String,
    object: ModelKind,
    /// When it was loaded, in seconds since 1970.
    created: u64,
    owned_by: String,
    /// Tokens of the longest source, where the model is an encoder-decoder: a prompt is then a source, and the text its
    /// translation.
    max_source_tokens: Option<u64>,
}

/// All models that are served.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Models {
    object: ListKind,
    data: Vec<Model>,
}

/// How the server is.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Health {
    status: HealthStatus,
}

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum HealthStatus {
    Ok,
    Ready,
}

/// Why a request was refused, or what went wrong.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Error {
    error: ErrorDetails,
}

/// What is known of an error.
#[derive(ToSchema)]
struct ErrorDetails {
    /// In words, for people: the parameter and its bound.
    message: String,
    r#type: ErrorKind,
    /// The parameter at fault, where it is one.
    #[schema(required)]
    param: Option<String>,
    /// In a word, for programs, where there is one.
    #[schema(required)]
    code: Option<String>,
}

/// Whose fault it is: the request's, the number of requests, or the server's.
#[derive(ToSchema)]
#[serde(rename_all = "snake_case")]
enum ErrorKind {
    InvalidRequestError,
    RateLimitError,
    ServerError,
}

/// The description of an API, as OpenAPI 3.1.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Description {
    openapi: String,
    #[schema(value_type = Object)]
    info: Value,
    servers: Vec<Value>,
    #[schema(value_type = Object)]
    paths: Value,
    #[schema(value_type = Object)]
    components: Value,
    security: Vec<Value>,
    tags: Vec<Value>,
}
