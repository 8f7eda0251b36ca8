//! The headers that name a session's version.

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use serde::Deserialize;

/// The same version as in `etag`, without quotes.
const HEADER: HeaderName = HeaderName::from_static("x-session-version");

/// Adds the headers that name the version, if there is one.
pub(in crate::api) fn tagged(mut response: Response, version: Option<&str>) -> Response {
    let Some(version) = version else { return response };
    for (name, value) in [(header::ETAG, format!("\"{version}\"")), (HEADER, version.to_owned())] {
        if let Ok(value) = HeaderValue::try_from(value) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// Returns the version that the stored body of a turn's response names; `None` if it was not a turn.
pub(in crate::api) fn of_body(body: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Turn {
        session: Session,
    }
    #[derive(Deserialize)]
    struct Session {
        version: String,
    }
    serde_json::from_str(body).ok().map(|Turn { session: Session { version } }| version)
}
