//! The `async-openai` crate as a client, over a real socket and with the shipped checkpoint.

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::{ApiErrorResponse, OpenAIError};
use async_openai::types::chat::{
    ChatCompletionRequestMessage, ChatCompletionRequestSystemMessageArgs, ChatCompletionRequestUserMessageArgs,
    ChatCompletionStreamOptions, CreateChatCompletionRequest, CreateChatCompletionRequestArgs,
};
use async_openai::types::completions::{CreateCompletionRequest, CreateCompletionRequestArgs};
use async_openai::types::responses::{CreateResponseArgs, ResponseStreamEvent, Status};
use futures_util::StreamExt;
use tidegate_server::{AppState, app, serve};
use tokio::net::TcpListener;

/// Returns a client of a new server, which stops with the test's runtime.
async fn client(state: AppState) -> Client<OpenAIConfig> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let base = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { serve(listener, app(state), std::future::pending()).await });
    Client::with_config(OpenAIConfig::new().with_api_base(base).with_api_key("none"))
}

fn completion() -> CreateCompletionRequest {
    let mut request = CreateCompletionRequestArgs::default();
    request.model("tidegate-tiny").prompt("Once upon a time").max_tokens(16_u32).temperature(0.0).build().unwrap()
}

fn chat() -> CreateChatCompletionRequest {
    let system = ChatCompletionRequestSystemMessageArgs::default().content("You tell tales.").build().unwrap();
    let user = ChatCompletionRequestUserMessageArgs::default().content("Tell me of a fox.").build().unwrap();
    let messages: Vec<ChatCompletionRequestMessage> = vec![system.into(), user.into()];
    let mut request = CreateChatCompletionRequestArgs::default();
    request.model("tidegate-tiny").messages(messages).max_completion_tokens(16_u32).temperature(0.0).build().unwrap()
}

/// Returns the server's error for a refused request.
fn refused<T>(answer: Result<T, OpenAIError>) -> ApiErrorResponse {
    match answer {
        Err(OpenAIError::ApiError(error)) => error,
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("the request was not refused"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_are_the_same_whole_and_streamed() {
    let client = client(crate::common::shipped()).await;
    let models = client.models().list().await.unwrap();
    assert_eq!(models.data[0].id, "tidegate-tiny");
    let whole = client.completions().create(completion()).await.unwrap();
    let text = &whole.choices[0].text;
    assert!(!text.trim().is_empty());
    assert_eq!(whole.usage.unwrap().completion_tokens, 16);
    let mut stream = client.completions().create_stream(completion()).await.unwrap();
    let mut pieces = Vec::new();
    while let Some(chunk) = stream.next().await {
        pieces.extend(chunk.unwrap().choices.into_iter().map(|choice| choice.text));
    }
    assert!(pieces.len() > 4 && pieces.concat() == *text, "{pieces:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_is_the_same_whole_and_streamed() {
    let client = client(crate::common::shipped()).await;
    let whole = client.chat().create(chat()).await.unwrap();
    let text = whole.choices[0].message.content.clone().unwrap();
    assert!(!text.trim().is_empty());
    let mut request = chat();
    request.stream_options = Some(ChatCompletionStreamOptions { include_usage: Some(true), include_obfuscation: None });
    let mut stream = client.chat().create_stream(request).await.unwrap();
    let (mut pieces, mut usage) = (String::new(), None);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.unwrap();
        pieces.extend(chunk.choices.into_iter().filter_map(|choice| choice.delta.content));
        usage = chunk.usage.or(usage);
    }
    assert_eq!(pieces, text);
    assert_eq!(usage.unwrap().completion_tokens, 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_are_created_streamed_and_continued() {
    let client = client(crate::common::sessions::app().await.state).await;
    let mut asked = CreateResponseArgs::default();
    asked.model("tidegate-tiny").max_output_tokens(16_u32).temperature(0.0);
    let first = client.responses().create(asked.input("Tell me of a fox.").build().unwrap()).await.unwrap();
    assert!(matches!(first.status, Status::Completed | Status::Incomplete));
    let going_on = asked.input("And then?").previous_response_id(&first.id).build().unwrap();
    let second = client.responses().create(going_on.clone()).await.unwrap();
    let text = second.output_text().unwrap();
    let mut stream = client.responses().create_stream(going_on).await.unwrap();
    let mut pieces = String::new();
    while let Some(event) = stream.next().await {
        if let ResponseStreamEvent::ResponseOutputTextDelta(event) = event.unwrap() {
            pieces.push_str(&event.delta);
        }
    }
    assert_eq!(pieces, text);
    let read = client.responses().retrieve(&second.id).await.unwrap();
    assert_eq!((read.output_text(), read.previous_response_id), (Some(text), Some(first.id.clone())));
    client.responses().delete(&first.id).await.unwrap();
    assert_eq!(refused(client.responses().retrieve(&first.id).await).status_code, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_become_errors_of_the_crate() {
    let client = client(crate::common::shipped()).await;
    let hot = CreateCompletionRequest { temperature: Some(9.0), ..completion() };
    let error = refused(client.completions().create(hot).await);
    assert_eq!(error.status_code, 400);
    assert_eq!(error.api_error.param.as_deref(), Some("temperature"));
    assert_eq!(error.api_error.r#type.as_deref(), Some("invalid_request_error"));
    let other = CreateCompletionRequest { model: "gpt-x".into(), ..completion() };
    let error = refused(client.completions().create(other).await);
    assert_eq!((error.status_code.as_u16(), error.api_error.code.as_deref()), (404, Some("model_not_found")));
}
