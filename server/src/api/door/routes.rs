//! The table of routes: a router that knows what it was built from.

use axum::Router;
use axum::routing::MethodRouter;

use crate::api::state::AppState;

/// Routes, and their list: what walks all of them cannot forget one.
#[derive(Default)]
pub(in crate::api) struct Routes {
    router: Router<AppState>,
    paths: Vec<&'static str>,
}

impl Routes {
    /// Adds a path and its methods. What it needs of a key is said by [`super::Access::of`].
    pub(in crate::api) fn route(mut self, path: &'static str, methods: MethodRouter<AppState>) -> Self {
        self.paths.push(path);
        Self { router: self.router.route(path, methods), paths: self.paths }
    }

    /// The paths, as the router takes them.
    pub(in crate::api) fn paths(&self) -> &[&'static str] {
        &self.paths
    }

    /// The router.
    pub(in crate::api) fn into_router(self) -> Router<AppState> {
        self.router
    }
}
