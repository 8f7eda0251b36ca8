//! Every route, described; `tests/api/openapi/` holds this to the router, both ways.

mod dialects;
mod service;
mod sessions;
mod text;

use super::route::Route;

/// All of them, in the order in which they are shown.
pub(super) fn all() -> Vec<Route> {
    [text::routes(), sessions::routes(), dialects::routes(), service::routes()].into_iter().flatten().collect()
}
