//! Opens object stores by their URLs.

use object_store::path::Path;
use object_store::{ObjectStore, parse_url_opts};
use url::Url;

/// Returns the object store at `url` and the path in it. Settings come from environment variables. Failures of S3 are
/// reported after some seconds; by default, `object_store` would retry for three minutes.
///
/// # Errors
/// The URL or a variable is wrong, or this program was built without that kind of store.
pub fn objects_at(
    url: &Url,
    variables: impl IntoIterator<Item = (String, String)>,
) -> object_store::Result<(Box<dyn ObjectStore>, Path)> {
    #[cfg(feature = "s3")]
    if let (object_store::ObjectStoreScheme::AmazonS3, path) = object_store::ObjectStoreScheme::parse(url)? {
        return Ok((Box::new(s3::open(url, variables)?), path));
    }
    parse_url_opts(url, variables)
}

#[cfg(feature = "s3")]
mod s3 {
    use std::time::Duration;

    use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
    use object_store::{BackoffConfig, RetryConfig};
    use url::Url;

    /// Time after which no further attempt begins. Attempts without an answer are ended by the store's own time limit.
    const PATIENCE: Duration = Duration::from_secs(3);

    pub(super) fn open(
        url: &Url,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> object_store::Result<AmazonS3> {
        let mut builder = AmazonS3Builder::new().with_url(url.as_str());
        for (name, value) in variables {
            if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
                builder = builder.with_config(key, value);
            }
        }
        let backoff =
            BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: Duration::from_secs(1), base: 2.0 };
        builder.with_retry(RetryConfig { backoff, max_retries: 10, retry_timeout: PATIENCE }).build()
    }
}

#[cfg(all(test, feature = "s3"))]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::session::error::StoreError;
    use crate::session::id::VersionId;
    use crate::session::objects::Objects;

    /// Answers one request with an error that says that the token is wrong and quotes it.
    async fn refuse(listener: TcpListener) {
        let (mut socket, _) = listener.accept().await.expect("a connection");
        let mut request = [0; 4096];
        let read = socket.read(&mut request).await.expect("a request");
        let request = String::from_utf8_lossy(&request[..read]).into_owned();
        assert!(request.contains("AWS4-HMAC-SHA256") && request.contains("the-token"), "{request}");
        let body = "<?xml version=\"1.0\"?><Error><Code>InvalidToken</Code><Token-0>the-token</Token-0></Error>";
        let answer = format!("HTTP/1.1 403 Forbidden\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        socket.write_all(answer.as_bytes()).await.expect("an answer");
    }

    #[test]
    fn a_refusal_of_s3_is_reported_without_keys_and_tokens() {
        crate::sync::block_on(async {
            let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
            let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
            let variables = [
                ("AWS_ENDPOINT", &*endpoint),
                ("AWS_ALLOW_HTTP", "true"),
                ("AWS_ACCESS_KEY_ID", "the-id"),
                ("AWS_SECRET_ACCESS_KEY", "the-secret"),
                ("AWS_SESSION_TOKEN", "the-token"),
                ("PATH", "/bin"),
            ];
            let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
            let (store, path) = objects_at(&"s3://bucket/folder".parse().expect("a URL"), variables).expect("a store");
            assert_eq!(path.as_ref(), "folder");
            let objects = Objects::new(Arc::from(store));
            let (id, refused) = (VersionId::new(), tokio::spawn(refuse(listener)));
            let error = objects.get(&id, 1).await.expect_err("it is refused");
            refused.await.expect("a request");
            let StoreError::Unavailable { reason } = error else { panic!("{error}") };
            assert!(reason.contains("403 Forbidden (InvalidToken)") && reason.contains(&endpoint), "{reason}");
            assert!(
                !["the-id", "the-secret", "the-token", "Signature"].iter().any(|secret| reason.contains(secret)),
                "{reason}"
            );
        });
    }
}
