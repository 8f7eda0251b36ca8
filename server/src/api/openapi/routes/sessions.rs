//! The routes of kept conversations.

use serde_json::json;
use utoipa::openapi::HttpMethod;
use utoipa::openapi::schema::{ObjectBuilder, Type};

use crate::api::openapi::route::{BYTES, Route, idempotency_key, if_match, in_path, in_query, prefer};
use crate::api::openapi::schemas::{Appended, Deleted, Error, ForkedSessions, Session, Sessions, Turns};
use crate::api::sessions::{AppendRequest, CreateRequest, ForkRequest, PatchRequest, RewindRequest};

const TAG: &str = "sessions";
const ETAG: &str = "The session's version.";

pub(super) fn routes() -> Vec<Route> {
    let routes =
        [create(), list(), read(), change(), delete(), append(), fork(), rewind(), turns(), download(), upload()];
    routes.into_iter().map(|route| route.tag(TAG)).collect()
}

fn id() -> utoipa::openapi::path::Parameter {
    in_path("id", "The session's id.")
}

fn create() -> Route {
    let examples = [
        ("empty", json!({})),
        (
            "with a text",
            json!({"text": "Once upon a time there was", "metadata": {"tale": "fox"}, "ttl_seconds": 3600}),
        ),
    ];
    Route::post("/v1/sessions", "createSession", "Make a session")
        .says("With at most one of `text`, `tokens`, `messages`, `version` and `snapshot`; empty without any.")
        .with([idempotency_key()])
        .takes::<CreateRequest>(false, &examples)
        .gives::<Session>(201, "The session.")
        .header(201, "etag", ETAG)
        .fails::<Error>(&[400, 403, 404, 409, 413, 415, 422, 429, 500, 501, 503, 507])
}

fn list() -> Route {
    let limit = ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(1)).maximum(Some(100)).build();
    let order = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(["asc", "desc"])).build();
    let after = ObjectBuilder::new().schema_type(Type::String).build();
    Route::get("/v1/sessions", "listSessions", "List your sessions")
        .with([
            in_query("limit", "Sessions of a page; 20 where it is absent.", limit),
            in_query("after", "The last session of the page before.", after),
            in_query("order", "By the time of making, the newest first where it is absent.", order),
        ])
        .gives::<Sessions>(200, "A page of sessions.")
        .fails::<Error>(&[400, 404, 500, 501, 503])
}

fn read() -> Route {
    Route::get("/v1/sessions/{id}", "readSession", "Read a session")
        .with([id()])
        .gives::<Session>(200, "The session.")
        .header(200, "etag", ETAG)
        .fails::<Error>(&[400, 404, 500, 501, 503])
}

fn change() -> Route {
    let examples =
        [("a label for people", json!({"metadata": {"tale": "crow"}})), ("for ever", json!({"ttl_seconds": null}))];
    Route::new(HttpMethod::Patch, "/v1/sessions/{id}", "changeSession", "Change what is noted of a session")
        .with([id()])
        .takes::<PatchRequest>(false, &examples)
        .gives::<Session>(200, "The session.")
        .header(200, "etag", ETAG)
        .fails::<Error>(&[400, 404, 413, 415, 500, 501, 503])
}

fn delete() -> Route {
    Route::delete("/v1/sessions/{id}", "deleteSession", "Forget a session")
        .with([id()])
        .gives::<Deleted>(200, "It is no more.")
        .fails::<Error>(&[400, 404, 409, 500, 501, 503])
}

fn append() -> Route {
    let examples = [("text", json!({"text": " And then", "label": "more"})), ("token ids", json!({"tokens": [5, 6]}))];
    Route::post("/v1/sessions/{id}/append", "appendToSession", "Read something into a session")
        .says("One of `text`, `tokens` and `messages`; nothing is generated.")
        .with([id(), idempotency_key(), if_match(), prefer()])
        .takes::<AppendRequest>(true, &examples)
        .gives::<Appended>(200, "The session.")
        .header(200, "etag", ETAG)
        .fails::<Error>(&[400, 403, 404, 409, 412, 413, 415, 422, 429, 500, 501, 503, 507])
}

fn fork() -> Route {
    let examples = [("one", json!({})), ("three", json!({"n": 3, "metadata": {"tale": "fox"}}))];
    Route::post("/v1/sessions/{id}/fork", "forkSession", "Make sessions that begin where this one is")
        .says("Also while the session is in use: from its last commit.")
        .with([id(), idempotency_key()])
        .takes::<ForkRequest>(false, &examples)
        .gives::<ForkedSessions>(201, "The new sessions.")
        .fails::<Error>(&[400, 403, 404, 409, 413, 415, 422, 500, 501, 503, 507])
}

fn rewind() -> Route {
    Route::post("/v1/sessions/{id}/rewind", "rewindSession", "Go back to an earlier version, or to another branch")
        .with([id(), if_match(), prefer()])
        .takes::<RewindRequest>(true, &[])
        .gives::<Session>(200, "The session.")
        .header(200, "etag", ETAG)
        .fails::<Error>(&[400, 403, 404, 409, 412, 413, 415, 429, 500, 501, 503, 507])
}

fn turns() -> Route {
    Route::get("/v1/sessions/{id}/turns", "listTurns", "List the versions of a session")
        .with([id()])
        .gives::<Turns>(200, "The versions, oldest first, those that a rewind left too.")
        .fails::<Error>(&[400, 404, 500, 501, 503])
}

fn download() -> Route {
    let version = ObjectBuilder::new().schema_type(Type::String).build();
    Route::get("/v1/sessions/{id}/snapshot", "downloadSnapshot", "Take a conversation away as a file")
        .with([id(), in_query("version", "Which version; the head where it is absent.", version)])
        .gives_text(200, "The bytes of the snapshot.", BYTES)
        .header(200, "etag", ETAG)
        .header(200, "content-disposition", "A name for the file.")
        .fails::<Error>(&[400, 404, 500, 501, 503])
}

fn upload() -> Route {
    Route::post("/v1/snapshots", "uploadSnapshot", "Bring a conversation back")
        .says("The bytes of a snapshot that a server with the same model gave.")
        .takes_bytes()
        .gives::<Session>(201, "A new session.")
        .header(201, "etag", ETAG)
        .fails::<Error>(&[400, 403, 413, 415, 500, 501, 503, 507])
}
