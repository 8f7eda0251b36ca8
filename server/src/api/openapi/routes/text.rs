//! The routes that make text: completions, chat, responses, and streams that are taken up again.

use serde_json::json;

use crate::api::formats::responses::Object;
use crate::api::openapi::route::{Route, idempotency_key, if_match_of_body, in_path, in_query, last_event_id, prefer};
use crate::api::openapi::schemas::{
    Chat, ChatChunk, ChatRequest, Completion, CompletionChunk, CompletionRequest, Deleted, Error, ResponseEvent,
    ResponseRequest,
};
use crate::api::openapi::written::word;

const TAG: &str = "text";

/// What a request for text may be refused with.
const REFUSALS: [u16; 14] = [400, 403, 404, 409, 410, 412, 413, 415, 422, 429, 500, 501, 503, 507];

pub(super) fn routes() -> Vec<Route> {
    let routes = [completions(), chat(), create_response(), response(), delete_response(), stream()];
    routes.into_iter().map(|route| route.tag(TAG)).collect()
}

fn completions() -> Route {
    let examples = [
        ("text", json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0})),
        ("several, until a full stop", json!({"prompt": ["The old house", "A fox"], "max_tokens": 8, "stop": "."})),
        ("token ids", json!({"prompt": [5, 6, 7], "max_tokens": 2, "seed": 7, "return_token_ids": true})),
        ("two texts, with log probabilities", json!({"prompt": "Once", "n": 2, "max_tokens": 2, "logprobs": 2})),
        ("a form", json!({"prompt": "A number:", "max_tokens": 8, "regex": "[0-9]{1,4}"})),
        (
            "stream",
            json!({"prompt": "Once", "max_tokens": 4, "stream": true, "stream_options": {"include_usage": true}}),
        ),
    ];
    Route::post("/v1/completions", "createCompletion", "Go on with a text")
        .says(
            "OpenAI's format. With `session` it is a turn of a kept conversation. A field that other servers have and \
             this one has not is refused where it would change the answer, and ignored where not.",
        )
        .with([idempotency_key(), if_match_of_body(), prefer()])
        .takes::<CompletionRequest>(true, &examples)
        .gives::<Completion>(200, "The text, or where `stream` is true its pieces as server-sent events.")
        .header(200, "x-stream-id", "The stream's id where it can be taken up again.")
        .streams::<CompletionChunk>(
            "Events without names: `data: ` and a `CompletionChunk`, at the end `data: [DONE]`. Where something goes \
             wrong after the beginning, the last is an `Error`.",
        )
        .fails::<Error>(&REFUSALS.map(status))
}

fn chat() -> Route {
    let fox = json!([{"role": "user", "content": "Tell me of a fox."}]);
    let parts = json!([
        {"role": "system", "content": "You tell tales."},
        {"role": "user", "content": [{"type": "text", "text": "Tell me of a fox."}]},
    ]);
    let size = json!({"type": "object", "required": ["size"], "additionalProperties": false,
        "properties": {"size": {"enum": ["small", "large"]}}});
    let form = json!({"type": "json_schema", "json_schema": {"name": "fox", "schema": size}});
    let tool = json!({"type": "function", "function": {"name": "measure", "parameters": size}});
    let examples = [
        ("a message", json!({"messages": fox, "max_completion_tokens": 8, "temperature": 0})),
        ("parts", json!({"messages": parts, "max_tokens": 8, "top_p": 0.9, "seed": 7})),
        (
            "two, with log probabilities",
            json!({"messages": fox, "n": 2, "max_tokens": 2, "logprobs": true, "top_logprobs": 1}),
        ),
        ("a form", json!({"messages": fox, "max_tokens": 64, "response_format": form})),
        (
            "a tool",
            json!({"messages": fox, "max_tokens": 64, "tools": [tool], "tool_choice": "required", "stream": true}),
        ),
        ("stream", json!({"messages": fox, "max_tokens": 4, "stream": true})),
    ];
    Route::post("/v1/chat/completions", "createChatCompletion", "Answer messages")
        .says("OpenAI's format; the checkpoint's own chat template makes a text of the messages.")
        .with([idempotency_key(), if_match_of_body(), prefer()])
        .takes::<ChatRequest>(true, &examples)
        .gives::<Chat>(200, "The answer, or where `stream` is true its pieces as server-sent events.")
        .header(200, "x-stream-id", "The stream's id where it can be taken up again.")
        .streams::<ChatChunk>(
            "Events without names: `data: ` and a `ChatChunk`, at the end `data: [DONE]`. Where something goes wrong \
             after the beginning, the last is an `Error`.",
        )
        .fails::<Error>(&REFUSALS.map(status))
}

/// A stream that is gone is the business of the one who takes it up.
fn status(status: u16) -> u16 {
    if status == 410 { 408 } else { status }
}

fn create_response() -> Route {
    let messages = json!([{"role": "user", "content": "Tell me of a fox."}]);
    let examples = [
        ("text", json!({"input": "Tell me of a fox.", "max_output_tokens": 8, "temperature": 0})),
        ("messages", json!({"input": messages, "instructions": "Be brief.", "max_output_tokens": 8, "store": false})),
        ("stream", json!({"input": "Tell me of a fox.", "max_output_tokens": 4, "stream": true})),
    ];
    Route::post("/v1/responses", "createResponse", "Answer, and keep the answer")
        .says(
            "OpenAI's Responses API: a stored response can be gone on with, at the cost of the new tokens alone. \
             `instructions` of an earlier response have been read and cannot be unread; inputs are not kept.",
        )
        .with([idempotency_key()])
        .takes::<ResponseRequest>(true, &examples)
        .gives::<Object>(200, "The response, or where `stream` is true its events.")
        .streams::<ResponseEvent>(
            "OpenAI's events, each with its name: `response.created`, `response.in_progress`, \
             `response.output_item.added`, `response.content_part.added`, `response.output_text.delta` for each piece, \
             `response.output_text.done`, `response.content_part.done`, `response.output_item.done`, and last \
             `response.completed`, `response.incomplete`, or `error` and `response.failed`.",
        )
        .fails::<Error>(&[400, 403, 404, 408, 409, 413, 415, 422, 429, 500, 501, 503, 507])
}

fn response() -> Route {
    let flag = || word("false");
    Route::get("/v1/responses/{id}", "retrieveResponse", "Read a stored response")
        .with([
            in_path("id", "The response's id."),
            in_query("stream", "Not supported: a response is read whole.", flag()),
        ])
        .gives::<Object>(200, "The response, as it was given.")
        .fails::<Error>(&[400, 404, 500, 501, 503])
}

fn delete_response() -> Route {
    Route::delete("/v1/responses/{id}", "deleteResponse", "Forget a stored response")
        .with([in_path("id", "The response's id.")])
        .gives::<Deleted>(200, "It is no more.")
        .fails::<Error>(&[400, 404, 500, 501, 503])
}

fn stream() -> Route {
    Route::get("/v1/streams/{id}", "followStream", "Take up a stream again")
        .says("That of a turn with `\"on_disconnect\": \"continue\"`, from the event after `last-event-id`.")
        .with([in_path("id", "The id that came as `x-stream-id`."), last_event_id()])
        .gives_nothing(200, "The stream.")
        .streams::<CompletionChunk>(
            "The events of the stream, of a chat or of a completion, each with its number as `id`.",
        )
        .fails::<Error>(&[400, 404, 410, 500])
}
