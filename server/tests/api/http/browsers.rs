//! Attacks by other sites' web pages: DNS rebinding, and cross-origin requests that browsers send without a preflight.

use crate::common::fake::Fake;
use crate::common::{scripted, send, served, text};
use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use serde_json::Value;
use tidegate_server::api::AllowedHosts;
use tidegate_server::engine::EngineThread;
use tidegate_server::{ApiOptions, AppState, Keys};

const KEY: &str = "sk-0123456789abcdef";

fn hosts(address: &str, names: &[&str]) -> AllowedHosts {
    AllowedHosts::new(names.iter().map(|name| name.parse().unwrap()).collect(), address.parse().unwrap())
}

fn server(hosts: AllowedHosts, cors: &[&str]) -> (AppState, EngineThread) {
    let (_, engine, thread) = scripted(Fake::new(2), 4);
    let cors = cors.iter().map(|origin| origin.parse().unwrap()).collect();
    let state = AppState::new(ApiOptions { hosts, cors, ..ApiOptions::default() });
    state.serve(served(engine));
    (state, thread)
}

fn request(method: Method, path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let body = if method == Method::POST { r#"{"prompt": [1], "max_tokens": 1}"# } else { "" };
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(Body::from(body)).unwrap()
}

/// Returns the status and the error code.
async fn answer(state: &AppState, request: Request<Body>) -> (StatusCode, String) {
    let response = send(state, request).await;
    let status = response.status();
    let body: Value = serde_json::from_str(&text(response).await).unwrap_or_default();
    (status, body["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn refused(code: &str) -> (StatusCode, String) {
    (StatusCode::FORBIDDEN, code.to_owned())
}

#[tokio::test]
async fn a_name_that_was_rebound_to_loopback_gets_nothing() {
    let (state, _thread) = server(hosts("127.0.0.1", &["tide.example"]), &[]);
    for (method, path) in
        [(Method::GET, "/"), (Method::GET, "/v1/models"), (Method::GET, "/livez"), (Method::POST, "/v1/completions")]
    {
        for host in ["evil.example", "evil.example:8080", "localhost.evil.example", "192.0.2.9", "", "a b"] {
            let answer = answer(&state, request(method.clone(), path, &[("host", host)])).await;
            assert_eq!(answer, refused("host_not_allowed"), "{method} {path} {host:?}");
        }
        for host in ["localhost:8080", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST", "tide.example"] {
            let (status, _) = answer(&state, request(method.clone(), path, &[("host", host)])).await;
            assert_eq!(status, StatusCode::OK, "{method} {path} {host:?}");
        }
        // Requests without a host: HTTP/1.0, and tests without a socket.
        assert_eq!(answer(&state, request(method.clone(), path, &[])).await.0, StatusCode::OK);
        let url = format!("http://evil.example{path}");
        let other = request(method.clone(), &url, &[("host", "localhost")]);
        assert_eq!(answer(&state, other).await, refused("host_not_allowed"), "the URL comes before the header");
    }
    let response = send(&state, request(Method::POST, "/v1/messages", &[("host", "evil.example")])).await;
    let body = text(response).await;
    assert!(body.contains(r#""type":"permission_error""#), "errors keep the format of their path: {body}");
    assert!(body.contains("evil.example") && body.contains("--allowed-host"), "{body}");
}

#[tokio::test]
async fn with_keys_or_on_the_network_every_host_is_answered_unless_names_are_given() {
    let other = || request(Method::GET, "/livez", &[("host", "any.example")]);
    let (state, _thread) = server(hosts("127.0.0.1", &[]), &[]);
    assert_eq!(answer(&state, other()).await, refused("host_not_allowed"));
    state.set_api_keys(Keys::load(None, &[KEY.into()]).unwrap().unwrap());
    assert_eq!(answer(&state, other()).await.0, StatusCode::OK);
    let (state, _thread) = server(hosts("0.0.0.0", &[]), &[]);
    assert_eq!(answer(&state, other()).await.0, StatusCode::OK);
    let (state, _thread) = server(hosts("0.0.0.0", &["tide.example"]), &[]);
    assert_eq!(answer(&state, other()).await, refused("host_not_allowed"));
    state.set_api_keys(Keys::load(None, &[KEY.into()]).unwrap().unwrap());
    assert_eq!(answer(&state, other()).await, refused("host_not_allowed"));
}

#[tokio::test]
async fn a_page_of_another_origin_changes_nothing_unless_it_is_named() {
    let changes = [
        (Method::POST, "/v1/completions"),
        (Method::POST, "/v1/sessions"),
        (Method::DELETE, "/v1/sessions/ses_1"),
        (Method::POST, "/tokenize"),
    ];
    let foreign: [&[(&str, &str)]; 7] = [
        &[("host", "localhost:8080"), ("origin", "https://evil.example")],
        &[("host", "localhost:8080"), ("origin", "http://localhost:3000")],
        &[("host", "localhost:8080"), ("origin", "null")],
        &[("origin", "http://localhost:8080")],
        &[("host", "localhost:8080"), ("sec-fetch-site", "cross-site")],
        &[("host", "localhost:8080"), ("sec-fetch-site", "same-site")],
        &[("host", "localhost:8080"), ("sec-fetch-site", "cross-site"), ("origin", "http://localhost:8080")],
    ];
    let own: [&[(&str, &str)]; 6] = [
        &[],
        &[("host", "localhost:8080")],
        &[("host", "localhost:8080"), ("origin", "http://localhost:8080")],
        &[("host", "tide.example"), ("origin", "https://tide.example")],
        // Behind a proxy that forwards neither the host name nor the scheme.
        &[("host", "127.0.0.1:8080"), ("origin", "https://tide.example"), ("sec-fetch-site", "same-origin")],
        &[("host", "localhost:8080"), ("sec-fetch-site", "none")],
    ];
    for key in [None, Some(KEY)] {
        let (state, _thread) = server(AllowedHosts::default(), &[]);
        if let Some(key) = key {
            state.set_api_keys(Keys::load(None, &[key.into()]).unwrap().unwrap());
        }
        let bearer = format!("Bearer {KEY}");
        for (method, path) in &changes {
            for headers in foreign {
                let headers = [headers, &[("authorization", bearer.as_str())]].concat();
                let answer = answer(&state, request(method.clone(), path, &headers)).await;
                assert_eq!(answer, refused("cross_origin_request"), "{method} {path} {headers:?}");
            }
            for headers in own {
                let headers = [headers, &[("authorization", bearer.as_str())]].concat();
                let (status, code) = answer(&state, request(method.clone(), path, &headers)).await;
                assert_ne!(status, StatusCode::FORBIDDEN, "{method} {path} {headers:?}: {code}");
            }
        }
    }
}

#[tokio::test]
async fn a_form_of_another_site_creates_no_session() {
    // A browser sends this form without a preflight: it has no body and no content type.
    let form = |site: &str| Request::post("/v1/sessions").header("host", "localhost").header("sec-fetch-site", site);
    let app = crate::common::sessions::app().await;
    let refused = send(&app.state, form("cross-site").body(Body::empty()).unwrap()).await;
    assert_eq!(refused.status(), StatusCode::FORBIDDEN);
    let list = text(send(&app.state, crate::common::get("/v1/sessions")).await).await;
    assert!(list.contains(r#""data":[]"#), "{list}");
    let own = send(&app.state, form("same-origin").body(Body::empty()).unwrap()).await;
    assert_eq!(own.status(), StatusCode::CREATED);
}

#[tokio::test]
async fn links_of_other_sites_and_named_origins_work() {
    let (state, _thread) = server(hosts("127.0.0.1", &[]), &["https://good.example"]);
    let link = [("host", "localhost:8080"), ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")];
    for path in ["/", "/docs", "/livez", "/health", "/ready", "/openapi.json"] {
        assert_eq!(answer(&state, request(Method::GET, path, &link)).await.0, StatusCode::OK, "{path}");
    }
    let page = |origin| {
        let headers = [("host", "localhost:8080"), ("sec-fetch-site", "cross-site"), ("origin", origin)];
        request(Method::POST, "/v1/completions", &headers)
    };
    assert_eq!(answer(&state, page("https://good.example")).await.0, StatusCode::OK);
    assert_eq!(answer(&state, page("https://evil.example")).await, refused("cross_origin_request"));
    let (state, _thread) = server(hosts("127.0.0.1", &[]), &["*"]);
    for origin in ["https://evil.example", "null"] {
        assert_eq!(answer(&state, page(origin)).await.0, StatusCode::OK, "{origin}");
    }
}
