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

/// The models that an API key may be used for; all of them unless it lists some.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Vec<String>")]
pub(super) struct ModelScope(Option<Vec<String>>);

impl TryFrom<Vec<String>> for ModelScope {
    type Error = &'static str;

    fn try_from(names: Vec<String>) -> Result<Self, &'static str> {
        if names.is_empty() { Err("must not be empty: without it they are all models") } else { Ok(Self(Some(names))) }
    }
}

impl ModelScope {
    pub(super) fn allows(&self, model: &str) -> bool {
        self.0.as_ref().is_none_or(|names| names.iter().any(|name| name == model))
    }

    /// Whether these models include all those of `other`.
    pub(super) fn include(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(_), Some(names)) => names.iter().all(|name| self.allows(name)),
        }
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
    /// Returns the access that a request with `method` needs: public paths are public to read.
    pub(super) fn with_method(self, method: &Method) -> Self {
        match self {
            Self::Public if ![Method::GET, Method::HEAD].contains(method) => Self::AnyKey,
            access => access,
        }
    }
}
