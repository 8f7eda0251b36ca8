//! Database URLs: which ones are accepted, and that none reveals its password.

use super::*;

const PASSWORD: &str = "mellon7";

#[test]
fn a_url_is_taken_and_its_password_is_not_shown() {
    let text = format!("postgres://u:{PASSWORD}@db.example,other.example:5433/sessions?sslmode=require");
    let url: PostgresUrl = text.parse().expect("a URL");
    assert_eq!(url.to_string(), "postgres://db.example,other.example/sessions");
    assert_eq!(url.config.get_password(), Some(PASSWORD.as_bytes()));
    assert!(url.sends_password());
    for text in ["postgres://u@db.example/s", "postgres://u:p@localhost/s", "postgresql://u:p@127.0.0.1,[::1]/s"] {
        assert!(!text.parse::<PostgresUrl>().expect("a URL").sends_password(), "{text}");
    }
    let options = PostgresOptions::new(url.clone(), "m", NO_LIMITS);
    for shown in [format!("{url:?}"), format!("{options:?}"), url.to_string()] {
        assert!(!shown.contains(PASSWORD), "{shown}");
    }
}

#[test]
fn a_wrong_url_is_refused_without_its_password() {
    for text in [
        "",
        "mysql://u:{}@h/d",
        "host=h password={}",
        "postgres://u:{}@h:port/d",
        "postgres://u:{}@h/d?sslmode=verify-full",
        "postgres://u:{}@h/d?unknown=1",
        "postgres://u:{}@/d",
        "postgres://u:{}@h/d?sslrootcert=/nowhere/root.pem",
        "postgres://u:%ff{}@h:1:2/d",
    ] {
        let error = text.replace("{}", PASSWORD).parse::<PostgresUrl>().expect_err(text);
        assert!(!error.contains(PASSWORD), "{error}");
    }
}

/// The server's certificate is self-signed, so only its own file can verify it.
#[test]
fn a_connection_with_tls_is_verified() {
    with_schema(async |schema| {
        let Ok(root) = std::env::var("TIDEGATE_TEST_POSTGRES_ROOT") else {
            println!("skipped: TIDEGATE_TEST_POSTGRES_ROOT names no certificate");
            return;
        };
        let plain = std::env::var("TIDEGATE_TEST_POSTGRES").expect("the address of a server");
        let plain = plain.split('?').next().unwrap_or_default();
        let open = async |parameters: &str| {
            let url = format!("{plain}?{parameters}").parse().expect("a URL");
            let options = PostgresOptions { url, ..schema.options() };
            PostgresIndex::open(options, Box::new(|_| {})).await
        };
        let index = open(&format!("sslmode=require&sslrootcert={root}")).await.expect("an index");
        let rows = index.database.query(step!("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"));
        assert!(rows.await.expect("a row")[0].get::<_, bool>(0));
        for wrong in ["sslmode=require", "sslmode=prefer"] {
            let error = open(wrong).await.expect_err("the certificate is unknown");
            assert!(matches!(&error, StoreError::Database { reason } if reason.contains("certificate")), "{error}");
        }
        open("sslmode=disable").await.expect("an index");
    });
}
