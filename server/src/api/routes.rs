//! The table of routes: a router that knows what it was built from.

use axum::Router;
use axum::routing::MethodRouter;

use super::state::AppState;

/// Routes, and their list: what walks all of them cannot forget one.
#[derive(Default)]
pub(super) struct Routes {
    router: Router<AppState>,
    paths: Vec<&'static str>,
}

impl Routes {
    /// Adds a path and its methods. [`super::Access::of`] decides which key it needs.
    pub(super) fn route(mut self, path: &'static str, methods: MethodRouter<AppState>) -> Self {
        self.paths.push(path);
        Self { router: self.router.route(path, methods), paths: self.paths }
    }

    /// The paths, as the router takes them.
    pub(super) fn paths(&self) -> &[&'static str] {
        &self.paths
    }

    /// The router.
    pub(super) fn into_router(self) -> Router<AppState> {
        self.router
    }
}
