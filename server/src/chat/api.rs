//! Calls the HTTP API of this process without a socket, so that the same code as in a server decides what may be done
//! with a conversation.

use anyhow::{Context, Result};
use axum::Router;
use axum::body::{Body, BodyDataStream, Bytes, to_bytes};
use axum::http::{Method, Request, StatusCode, header};
use axum::response::Response;
use futures_util::StreamExt;
use serde_json::Value;
use tower::ServiceExt;

const JSON: &str = "application/json";

/// A request that the API refused, with the API's message.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Refused {
    status: StatusCode,
    message: String,
}

/// Returns whether the error means that the API did not find what a request names.
pub(super) fn is_missing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == StatusCode::NOT_FOUND)
}

/// Sends requests to the API.
pub(super) struct Api(Router);

impl Api {
    pub(super) fn new(routes: Router) -> Self {
        Self(routes)
    }

    pub(super) async fn get(&self, path: &str) -> Result<Value> {
        Ok(serde_json::from_slice(&self.download(path).await?)?)
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        let answer = self.send(Method::POST, path, JSON, body.to_string().into()).await?;
        Ok(serde_json::from_slice(&whole(answer).await?)?)
    }

    pub(super) async fn delete(&self, path: &str) -> Result<()> {
        self.send(Method::DELETE, path, JSON, Body::empty()).await.map(drop)
    }

    pub(super) async fn download(&self, path: &str) -> Result<Bytes> {
        whole(self.send(Method::GET, path, JSON, Body::empty()).await?).await
    }

    pub(super) async fn upload(&self, path: &str, bytes: Vec<u8>) -> Result<Value> {
        let answer = self.send(Method::POST, path, "application/octet-stream", bytes.into()).await?;
        Ok(serde_json::from_slice(&whole(answer).await?)?)
    }

    /// Sends a request and returns its streamed answer.
    pub(super) async fn stream(&self, path: &str, body: &Value) -> Result<Events> {
        let answer = self.send(Method::POST, path, JSON, body.to_string().into()).await?;
        let id = answer.headers().get("x-stream-id").and_then(|id| id.to_str().ok());
        let path = format!("/v1/streams/{}", id.context("the stream has no id")?);
        Ok(Events { path, body: answer.into_body().into_data_stream(), read: Vec::new() })
    }

    async fn send(&self, method: Method, path: &str, kind: &'static str, body: Body) -> Result<Response> {
        let request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, kind).body(body)?;
        let Ok(answer) = self.0.clone().oneshot(request).await;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let error: Value = serde_json::from_slice(&whole(answer).await?).unwrap_or_default();
        let message = error["error"]["message"].as_str().map_or_else(|| status.to_string(), str::to_owned);
        Err(Refused { status, message }.into())
    }
}

async fn whole(answer: Response) -> Result<Bytes> {
    Ok(to_bytes(answer.into_body(), usize::MAX).await?)
}

/// The events of a streamed answer.
pub(super) struct Events {
    /// The path at which the answer can be ended.
    pub(super) path: String,
    body: BodyDataStream,
    read: Vec<u8>,
}

impl Events {
    /// Returns the next event; `None` at the end. Cancel-safe: dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Result<Option<Value>> {
        loop {
            while let Some(end) = self.read.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.read.drain(..end + 2).collect();
                if let Some(event) = data(&event)? {
                    return Ok(Some(event));
                }
            }
            match self.body.next().await {
                Some(bytes) => self.read.extend_from_slice(&bytes?),
                None => return Ok(None),
            }
        }
    }
}

/// Returns the data of an event; `None` for a comment and for the end marker.
fn data(event: &[u8]) -> Result<Option<Value>> {
    let text = std::str::from_utf8(event)?;
    match text.lines().find_map(|line| line.strip_prefix("data: ")) {
        None | Some("[DONE]") => Ok(None),
        Some(data) => Ok(Some(serde_json::from_str(data)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn events_are_read_however_their_bytes_arrive() {
        let text = "id: 0\ndata: {\"a\":\"é\"}\n\n: alive\n\ndata: {\"a\":2}\n\ndata: [DONE]\n\n";
        for size in [1, 2, 7, text.len()] {
            let pieces: Vec<std::io::Result<Bytes>> =
                text.as_bytes().chunks(size).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
            let body = Body::from_stream(futures_util::stream::iter(pieces)).into_data_stream();
            let mut events = Events { path: String::new(), body, read: Vec::new() };
            assert_eq!(events.next().await.unwrap().unwrap()["a"], "é");
            assert_eq!(events.next().await.unwrap().unwrap()["a"], 2);
            assert_eq!(events.next().await.unwrap(), None);
        }
    }
}
