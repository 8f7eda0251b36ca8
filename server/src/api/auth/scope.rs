//! The scopes of API keys, and the access that a route needs.

use std::fmt;

use axum::http::Method;
use serde::Deserialize;

/// What an API key may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Generating text and everything that prepares it: completions, chat, tokens, models.
    Generate,
    /// Everything that is stored: sessions, snapshots, resumable streams, stored responses.
    Sessions,
    /// The server's metrics.
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

/// The access that a path needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No key is needed to read.
    Public,
    /// Any valid key. For paths without a route: only clients with a key learn that there is none.
    AnyKey,
    /// A key with this scope.
    Scope(Scope),
}

impl Access {
    /// The access that a request with `method` needs: public paths are public to read.
    pub(super) fn with_method(self, method: &Method) -> Self {
        match self {
            Self::Public if ![Method::GET, Method::HEAD].contains(method) => Self::AnyKey,
            access => access,
        }
    }
}
