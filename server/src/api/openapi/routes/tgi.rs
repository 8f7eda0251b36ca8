//! The routes of text-generation-inference.

use serde_json::json;

use crate::api::openapi::route::Route;
use crate::api::openapi::schemas::{
    GenerateError, GenerateRequest, Generated, GeneratedList, GeneratedToken, ServerInfo,
};

/// What is wrong with a parameter is a 422 here.
const REFUSALS: [u16; 9] = [401, 403, 404, 408, 413, 415, 422, 429, 503];

pub(super) fn routes() -> Vec<Route> {
    [generate(), generate_stream(), either(), info()].into_iter().map(|route| route.tag("other formats")).collect()
}

fn asked() -> [(&'static str, serde_json::Value); 2] {
    let drawn =
        json!({"max_new_tokens": 4, "do_sample": true, "seed": 7, "stop": ["."], "top_n_tokens": 2, "details": true});
    [
        ("text", json!({"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8}})),
        ("details", json!({"inputs": "Once upon a time", "parameters": drawn})),
    ]
}

fn generate() -> Route {
    Route::post("/generate", "generate", "Go on with a text, as text-generation-inference does")
        .takes::<GenerateRequest>(true, &asked())
        .gives::<Generated>(200, "The text.")
        .fails::<GenerateError>(&REFUSALS)
        .fails::<GenerateError>(&[500])
}

fn generate_stream() -> Route {
    Route::post("/generate_stream", "generateStream", "The same, streamed")
        .takes::<GenerateRequest>(true, &asked())
        .gives_nothing(200, "The tokens as server-sent events.")
        .streams::<GeneratedToken>("One for each token; the last has the text.")
        .fails::<GenerateError>(&REFUSALS)
        .fails::<GenerateError>(&[500])
}

fn either() -> Route {
    Route::post("/", "generateEither", "Either of them, as `stream` says")
        .takes::<GenerateRequest>(true, &asked())
        .gives::<GeneratedList>(200, "The text after its prompt, or where `stream` is true its tokens.")
        .streams::<GeneratedToken>("One for each token; the last has the text.")
        .fails::<GenerateError>(&REFUSALS)
        .fails::<GenerateError>(&[500])
}

fn info() -> Route {
    Route::get("/info", "info", "What text-generation-inference's clients want to know of the server")
        .gives::<ServerInfo>(200, "The facts.")
        .fails::<GenerateError>(&[401, 403, 429, 500, 503])
}
