//! Refuses what a browser sends on behalf of other sites: requests under a host name that is not the server's, and
//! requests from web pages of other origins that change or cost something. Other clients send neither.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::cors::allows;
use super::hosts::AllowedHosts;
use crate::api::error::ApiError;
use crate::api::state::AppState;

/// The middleware's state: the application's state, and the hosts of the listener.
#[derive(Clone)]
pub(in crate::api) struct Browsers {
    pub(in crate::api) state: AppState,
    pub(in crate::api) hosts: AllowedHosts,
    /// Whether the API keys, if there are any, protect this listener.
    pub(in crate::api) keyed: bool,
}

/// Middleware that passes on requests to a host of this server, from pages that may send them.
pub(in crate::api) async fn check_browser(State(browsers): State<Browsers>, request: Request, next: Next) -> Response {
    match browsers.check(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

impl Browsers {
    fn check(&self, request: &Request) -> Result<(), ApiError> {
        let has_keys = self.keyed && self.state.api_keys().get().is_some();
        if self.hosts.restricted(has_keys)
            && let Some(host) = hosts(request).find(|host| !self.hosts.allows(host))
        {
            let message =
                format!("the host `{host}` is not a name of this server; --allowed-host adds names that it accepts");
            return Err(forbidden("host_not_allowed", message));
        }
        let headers = request.headers();
        let safe = [Method::GET, Method::HEAD, Method::OPTIONS].contains(request.method());
        let named = headers.get(header::ORIGIN).is_some_and(|origin| allows(&self.state.options().cors, origin));
        if safe || named || !is_cross_origin(headers, hosts(request).next()) {
            return Ok(());
        }
        let page = headers.get(header::ORIGIN).and_then(|origin| origin.to_str().ok()).unwrap_or("another origin");
        let message = format!("web pages of {page} may not send this request; --cors-origin allows an origin");
        Err(forbidden("cross_origin_request", message))
    }
}

fn forbidden(code: &'static str, message: String) -> ApiError {
    ApiError::request(StatusCode::FORBIDDEN, None, Some(code), message)
}

/// Returns the hosts that a request names; empty if the client names none. Browsers always name one.
fn hosts(request: &Request) -> impl Iterator<Item = &str> {
    let uri = request.uri().authority().map(axum::http::uri::Authority::as_str);
    // A name that is not text is refused, like one that is not a host.
    let headers = request.headers().get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or_default());
    uri.into_iter().chain(headers)
}

/// Whether a page of another origin has sent the request. Pages can neither set nor leave out the headers that say so.
fn is_cross_origin(headers: &HeaderMap, host: Option<&str>) -> bool {
    match headers.get("sec-fetch-site").map(HeaderValue::as_bytes) {
        // Holds even if a proxy has changed the host.
        Some(b"same-origin") => false,
        Some(b"cross-site" | b"same-site") => true,
        // The user's own request, or a browser that sends only the origin because the server has no TLS.
        _ => headers.get(header::ORIGIN).is_some_and(|origin| !is_origin_of(origin, host)),
    }
}

/// Whether the origin is that of the server's own pages. The scheme may differ: a proxy may add TLS.
fn is_origin_of(origin: &HeaderValue, host: Option<&str>) -> bool {
    let (Some((scheme, page)), Some(host)) = (origin.to_str().ok().and_then(|text| text.split_once("://")), host)
    else {
        return false;
    };
    let default_port = match scheme {
        "http" => ":80",
        "https" => ":443",
        _ => return false,
    };
    let comparable = |host: &str| host.strip_suffix(default_port).unwrap_or(host).to_ascii_lowercase();
    comparable(page) == comparable(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_compared_with_the_host_and_its_port() {
        for (origin, host, same) in [
            ("http://localhost:8080", "localhost:8080", true),
            ("https://tide.example", "tide.example", true),
            ("https://tide.example", "Tide.Example:443", true),
            ("http://[::1]:8080", "[::1]:8080", true),
            ("http://localhost:3000", "localhost:8080", false),
            ("http://tide.example:443", "tide.example", false),
            ("http://localhost.evil.example", "localhost", false),
            ("null", "localhost", false),
            ("file://localhost", "localhost", false),
        ] {
            assert_eq!(is_origin_of(&HeaderValue::from_static(origin), Some(host)), same, "{origin} {host}");
        }
        assert!(!is_origin_of(&HeaderValue::from_static("http://localhost"), None));
    }
}
