//! The routes that other servers have: Anthropic's messages, llama.cpp's completion, tokens, and what is not here.

use serde_json::json;

use crate::api::openapi::route::{Route, in_query};
use crate::api::openapi::schemas::{
    AnthropicError, AnthropicEvent, AnthropicMessage, CountRequest, DetokenizeRequest, Detokenized, Error,
    LlamaCompletion, LlamaCompletions, LlamaError, LlamaRequest, MessagesRequest, Props, Rendered, Slots,
    TemplateRequest, TokenCount, TokenizeRequest, Tokenized,
};
use crate::api::openapi::written::anything;

/// What any request for text may be refused with.
const REFUSALS: [u16; 10] = [400, 401, 403, 404, 408, 413, 415, 429, 500, 503];

pub(super) fn routes() -> Vec<Route> {
    let mut routes = vec![messages(), count_tokens()];
    routes.extend([completion("/completion", "llamaCompletion"), completion("/completions", "llamaCompletions")]);
    routes.extend([infill(), props(), slots(), tokenize(), detokenize(), apply_template()]);
    for (path, id) in
        [("/v1/embeddings", "embeddings"), ("/embeddings", "llamaEmbeddings"), ("/embedding", "embedding")]
    {
        routes.push(nothing(path, id));
    }
    routes.into_iter().map(|route| route.tag("other formats")).collect()
}

fn fox() -> serde_json::Value {
    json!([{"role": "user", "content": "Tell me of a fox."}])
}

fn messages() -> Route {
    let body =
        |stream| json!({"model": "MODEL", "messages": fox(), "max_tokens": 8, "temperature": 0, "stream": stream});
    let prefilled =
        json!([{"role": "user", "content": "Tell me of a fox."}, {"role": "assistant", "content": "A fox"}]);
    let examples = [
        ("a message", body(false)),
        ("begun", json!({"model": "MODEL", "messages": prefilled, "max_tokens": 8, "system": "You tell tales."})),
        ("stream", body(true)),
    ];
    Route::post("/v1/messages", "createMessage", "Answer messages, as Anthropic does")
        .takes::<MessagesRequest>(true, &examples)
        .gives::<AnthropicMessage>(200, "The answer, or where `stream` is true its events.")
        .streams::<AnthropicEvent>("Anthropic's events, each with its name.")
        .header(200, "request-id", "As `x-request-id`.")
        .fails::<AnthropicError>(&REFUSALS)
}

fn count_tokens() -> Route {
    let examples = [("a message", json!({"model": "MODEL", "messages": fox()}))];
    Route::post("/v1/messages/count_tokens", "countTokens", "Count the tokens of messages, as Anthropic does")
        .takes::<CountRequest>(true, &examples)
        .gives::<TokenCount>(200, "How many there are.")
        .header(200, "request-id", "As `x-request-id`.")
        .fails::<AnthropicError>(&REFUSALS)
}

fn completion(path: &'static str, id: &str) -> Route {
    let examples = [
        ("text", json!({"prompt": "Once upon a time", "n_predict": 8, "temperature": 0})),
        ("probabilities", json!({"prompt": "Once", "n_predict": 2, "n_probs": 2, "seed": 7, "stop": ["."]})),
        ("stream", json!({"prompt": "Once", "n_predict": 4, "stream": true})),
    ];
    Route::post(path, id, "Go on with a text, as llama.cpp does")
        .takes::<LlamaRequest>(true, &examples)
        .gives::<LlamaCompletions>(200, "The text, or where `stream` is true its pieces as server-sent events.")
        .streams::<LlamaCompletion>("The pieces, the last with `stop`.")
        .fails::<LlamaError>(&REFUSALS)
}

fn infill() -> Route {
    Route::post("/infill", "infill", "What is between two texts: not here")
        .fails::<LlamaError>(&[401, 403, 429, 500, 501])
}

fn props() -> Route {
    Route::get("/props", "props", "What llama.cpp's clients want to know of the server")
        .gives::<Props>(200, "The properties.")
        .fails::<LlamaError>(&[401, 403, 429, 500, 503])
}

fn slots() -> Route {
    Route::get("/slots", "slots", "How many requests run, as llama.cpp says it")
        .with([in_query("fail_on_no_slot", "`1`: 503 where none is free.", anything())])
        .gives::<Slots>(200, "The slots.")
        .fails::<LlamaError>(&[401, 403, 429, 500, 503])
}

fn tokenize() -> Route {
    let examples = [
        ("llama.cpp", json!({"content": "Once upon a time", "with_pieces": true})),
        ("vLLM", json!({"prompt": "Once upon a time", "return_token_strs": true})),
    ];
    Route::post("/tokenize", "tokenize", "The tokens of a text")
        .takes::<TokenizeRequest>(true, &examples)
        .gives::<Tokenized>(200, "The tokens.")
        .fails::<Error>(&REFUSALS)
}

fn detokenize() -> Route {
    Route::post("/detokenize", "detokenize", "The text of tokens")
        .takes::<DetokenizeRequest>(true, &[("ids", json!({"tokens": [5, 6, 7]}))])
        .gives::<Detokenized>(200, "The text.")
        .fails::<Error>(&REFUSALS)
}

fn apply_template() -> Route {
    Route::post("/apply-template", "applyTemplate", "The text of messages, as the model reads it")
        .takes::<TemplateRequest>(true, &[("a message", json!({"messages": fox()}))])
        .gives::<Rendered>(200, "The text.")
        .fails::<Error>(&REFUSALS)
}

fn nothing(path: &'static str, id: &str) -> Route {
    Route::post(path, id, "Embeddings: the model is not trained for them").fails::<Error>(&[401, 403, 429, 500, 501])
}
