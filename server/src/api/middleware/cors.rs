//! CORS: which web pages may read responses in a browser. None by default.

use std::str::FromStr;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// How long a browser may cache a preflight response.
const MAX_AGE: Duration = Duration::from_mins(10);

/// Response headers that pages may read besides the safelisted ones.
const EXPOSED_HEADERS: [&str; 13] = [
    "etag",
    "location",
    "retry-after",
    "x-ignored-fields",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-request-id",
    "x-session-version",
    "x-stream-id",
];

/// An origin as browsers send it, `https://example.org`, with a port if it is not the default; or `*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(HeaderValue);

/// The text is not an origin.
#[derive(Debug, thiserror::Error)]
#[error("must be * or an origin as browsers send it, such as https://example.org:8443, without a path")]
pub struct OriginError;

impl FromStr for Origin {
    type Err = OriginError;

    fn from_str(text: &str) -> Result<Self, OriginError> {
        let text = text.trim();
        let host = |rest: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || ".-:[]_".contains(c);
            !rest.is_empty() && rest.chars().all(plain)
        };
        let scheme = |scheme: &str| !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
        let whole = text.split_once("://").is_some_and(|(name, rest)| scheme(name) && host(rest));
        // Browsers send lower case, and origins are compared byte by byte.
        let value = HeaderValue::from_str(&text.to_ascii_lowercase()).map_err(|_| OriginError)?;
        (text == "*" || whole).then_some(Self(value)).ok_or(OriginError)
    }
}

/// Whether pages of the origin `given` are allowed.
pub(super) fn allows(origins: &[Origin], given: &HeaderValue) -> bool {
    origins.iter().any(|origin| origin.0 == "*" || origin.0 == given)
}

/// Returns the layer that allows pages of `origins` to read responses. Cookies and HTTP authentication by the browser
/// stay disallowed: a page sends an API key.
pub(in crate::api) fn cors(origins: &[Origin]) -> CorsLayer {
    let any = origins.iter().any(|origin| origin.0 == "*");
    let allowed =
        if any { AllowOrigin::any() } else { AllowOrigin::list(origins.iter().map(|origin| origin.0.clone())) };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE])
        // A wildcard would not cover `Authorization`.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED_HEADERS.map(HeaderName::from_static))
        .max_age(MAX_AGE)
        .vary([header::ORIGIN, header::ACCESS_CONTROL_REQUEST_HEADERS])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_origins_parse() {
        for origin in ["*", "https://example.org", "http://localhost:3000", "HTTP://[::1]:80", "tauri://localhost"] {
            assert!(origin.parse::<Origin>().is_ok(), "{origin}");
        }
        for other in ["", "null", "example.org", "https://", "https://example.org/", "https://a b", "https://*.org"] {
            assert!(other.parse::<Origin>().is_err(), "{other}");
        }
    }
}
