//! The routes that tell about the server.

use crate::api::openapi::route::{Route, in_path};
use crate::api::openapi::schemas::{Description, Error, Health, Model, Models};

const HTML: &str = "text/html; charset=utf-8";

pub(super) fn routes() -> Vec<Route> {
    let service = [models(), model(), health(), ready(), metrics()];
    let pages = [playground(), playground_file(), icon(), description(), docs(), docs_file()];
    let service = service.into_iter().map(|route| route.tag("service"));
    service.chain(pages.into_iter().map(|route| route.tag("pages"))).collect()
}

fn models() -> Route {
    Route::get("/v1/models", "listModels", "List the models")
        .gives::<Models>(200, "The one model that is served.")
        .fails::<Error>(&[500, 503])
}

fn model() -> Route {
    Route::get("/v1/models/{id}", "retrieveModel", "Read about a model")
        .with([in_path("id", "The model's name, which may hold slashes.")])
        .gives::<Model>(200, "The model.")
        .fails::<Error>(&[400, 404, 500, 503])
}

fn health() -> Route {
    Route::get("/health", "health", "Whether the process lives").gives::<Health>(200, "It does.").fails::<Error>(&[500])
}

fn ready() -> Route {
    Route::get("/ready", "ready", "Whether requests are taken")
        .gives::<Health>(200, "They are.")
        .fails::<Error>(&[500, 503])
}

fn metrics() -> Route {
    Route::get("/metrics", "metrics", "The figures of the server, for Prometheus")
        .gives_text(200, "The figures.", crate::metrics::CLASSIC)
        .or_text(200, crate::metrics::OPEN_METRICS)
        .fails::<Error>(&[500])
}

fn playground() -> Route {
    Route::get("/", "playground", "The playground").gives_text(200, "The page.", HTML).fails::<Error>(&[500])
}

fn playground_file() -> Route {
    Route::get("/playground/{file}", "playgroundFile", "What the playground loads")
        .with([in_path("file", "The file's name.")])
        .gives_text(200, "The file.", "text/css; charset=utf-8")
        .or_text(200, "text/javascript; charset=utf-8")
        .fails::<Error>(&[404, 500])
}

fn icon() -> Route {
    Route::get("/favicon.ico", "icon", "The icon of the pages")
        .gives_nothing(204, "There is none.")
        .fails::<Error>(&[500])
}

fn description() -> Route {
    Route::get("/openapi.json", "description", "This description")
        .says("With the bounds of this server, so there is none before its model is loaded.")
        .gives::<Description>(200, "The description, as OpenAPI 3.1.")
        .fails::<Error>(&[500, 503])
}

fn docs() -> Route {
    Route::get("/docs", "docs", "A page to try the API at").gives_text(200, "The page.", HTML).fails::<Error>(&[500])
}

fn docs_file() -> Route {
    Route::get("/docs/{file}", "docsFile", "What that page loads")
        .with([in_path("file", "The file's name.")])
        .gives_text(200, "The file.", "text/css; charset=utf-8")
        .or_text(200, "text/javascript; charset=utf-8")
        .fails::<Error>(&[404, 500])
}
