//! Receives and parses JSON bodies.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::{DeserializeOwned, IgnoredAny};

use super::numbers;
use super::wording::complaint;
use crate::api::error::ApiError;

/// The deepest nesting of objects and arrays that `serde_json` accepts.
const MAX_DEPTH: usize = 127;

/// Returns the body of a request, which must be declared as JSON.
pub(in crate::api) fn body(
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
    max_body_bytes: usize,
) -> Result<Bytes, ApiError> {
    check_type(headers)?;
    body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => too_long(max_body_bytes),
        status => ApiError::request(status, None, None, format!("the body could not be read: {rejection}")),
    })
}

/// Refuses a body of `length` bytes before it arrives, if [`body`] would refuse it afterwards.
pub(in crate::api) fn check_declared(
    headers: &HeaderMap,
    length: usize,
    max_body_bytes: usize,
) -> Result<(), ApiError> {
    check_type(headers)?;
    if length > max_body_bytes { Err(too_long(max_body_bytes)) } else { Ok(()) }
}

fn too_long(max_body_bytes: usize) -> ApiError {
    let message = format!("the body must be at most {max_body_bytes} bytes long");
    ApiError::request(StatusCode::PAYLOAD_TOO_LARGE, None, None, message)
}

fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    if !is_json(headers) {
        let message = "content-type must be application/json";
        return Err(ApiError::request(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, None, message));
    }
    check_encoding(headers)
}

/// Returns the length that a request's headers declare for its body.
pub(in crate::api) fn declared_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Refuses compressed bodies.
pub(in crate::api) fn check_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    let encoding = headers.get(header::CONTENT_ENCODING).map(|value| value.to_str().unwrap_or("of this name"));
    match encoding.filter(|encoding| !encoding.trim().eq_ignore_ascii_case("identity")) {
        None => Ok(()),
        Some(encoding) => {
            let message = format!("content-encoding {encoding} is not supported");
            Err(ApiError::request(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, None, message))
        }
    }
}

/// Parses a body; an error names the invalid field. In JSON Schema `8.0` is an integer, but serde refuses it: a body
/// that cannot be parsed is parsed again with `8` in its place.
pub(in crate::api) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    parse_strictly(body).or_else(|error| numbers::whole(body).map_or(Err(error), |body| parse_strictly(&body)))
}

fn parse_strictly<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    if body.trim_ascii().is_empty() {
        return Err(ApiError::invalid(None, "the body is empty; it must be a JSON object"));
    }
    // Serde would read the items of an array as the fields in their order.
    if body.trim_ascii_start().first() == Some(&b'[') {
        return Err(ApiError::invalid(None, "the body must be a JSON object, found an array"));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let request = serde_path_to_error::deserialize(&mut json).map_err(|error| field_error(&error, body))?;
    json.end().map_err(|error| ApiError::invalid(None, format!("the body must be one JSON object: {error}")))?;
    Ok(request)
}

fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()) else { return false };
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"))
}

fn field_error(error: &serde_path_to_error::Error<serde_json::Error>, body: &[u8]) -> ApiError {
    let field = error.path().iter().find_map(|segment| match segment {
        serde_path_to_error::Segment::Map { key } => Some(key.as_str()),
        _ => None,
    });
    // `serde_json` has no error code for its own limit.
    if error.inner().to_string().starts_with("recursion limit exceeded") {
        return ApiError::invalid(field, format!("the body must be nested at most {MAX_DEPTH} levels deep"));
    }
    let place = field.map_or_else(|| "the body".to_owned(), |_| error.path().to_string());
    // Where the name of a variant is expected, `serde_json` reports a value of another type as a syntax error.
    let wants_word = error.inner().to_string().starts_with("expected value");
    if wants_word && serde_json::from_slice::<IgnoredAny>(body).is_ok() {
        return ApiError::invalid(field, format!("{place} must be a string"));
    }
    ApiError::invalid(field, complaint(&place, error.inner()))
}
