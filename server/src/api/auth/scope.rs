//! What each path needs: the one place that says which are answered without a key.

use std::fmt;

use axum::http::Method;
use serde::Deserialize;

/// The paths that everybody may read, and only read: whether the server lives, and pages that hold nothing of anybody's.
const OPEN: [&str; 6] = ["/", "/favicon.ico", "/health", "/ready", "/docs", "/openapi.json"];

/// The folders of such paths.
const OPEN_FOLDERS: [&str; 2] = ["/playground/", "/docs/"];

/// The folders of what the server keeps for its clients, themselves included.
const KEPT: [&str; 4] = ["/v1/sessions", "/v1/snapshots", "/v1/streams", "/v1/responses/{id}"];

/// What a key opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Whatever makes text or prepares it: completions, chat, tokens, the models.
    Generate,
    /// Whatever is kept: sessions, snapshots, streams that go on, stored responses.
    Sessions,
    /// The figures of the server.
    Metrics,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Generate => "generate",
            Self::Sessions => "sessions",
            Self::Metrics => "metrics",
        })
    }
}

/// What a path needs of who asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No key is needed.
    Public,
    /// Any valid key: no route matches, and only clients with a key learn that.
    AnyKey,
    /// A key with this scope.
    Scope(Scope),
}

impl Access {
    /// That of a route, as it was given to the router, for a method; of none where no route is at the path. A route that
    /// nobody has thought of here needs a key, and so does whatever is sent to a page.
    pub fn of(route: Option<&str>, method: &Method) -> Self {
        let Some(route) = route else { return Self::AnyKey };
        let kept = |folder: &&str| {
            let rest = route.strip_prefix(*folder);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let is_page = OPEN.contains(&route) || OPEN_FOLDERS.iter().any(|folder| route.starts_with(folder));
        if is_page && [Method::GET, Method::HEAD].contains(method) {
            Self::Public
        } else if KEPT.iter().any(kept) {
            Self::Scope(Scope::Sessions)
        } else if route == "/metrics" {
            Self::Scope(Scope::Metrics)
        } else {
            Self::Scope(Scope::Generate)
        }
    }
}
