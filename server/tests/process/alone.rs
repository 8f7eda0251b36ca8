//! The program on its own: the shipped model, which is embedded in the binary, and `tidegate health`, the health check
//! of images without a shell.

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::live::Server;

/// Generates five tokens with the shipped model, which is unpacked into `cache` or, if that fails, into `temporary`.
fn generate(cache: &Path, temporary: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["generate", "Once upon a time", "--device", "cpu", "--seed", "5", "--max-tokens", "5", "--ignore-eos"])
        .current_dir(std::env::temp_dir())
        .env("XDG_CACHE_HOME", cache)
        .env("TMPDIR", temporary)
        .output()
        .unwrap()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_model_comes_out_of_the_program() {
    let (cache, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = generate(cache.path(), temporary.path());
    assert!(first.status.success(), "{}", errors(&first));
    assert!(entries(temporary.path()).is_empty(), "the cache is enough");
    let [version] = &entries(&cache.path().join("tidegate"))[..] else { panic!("one version in the cache") };
    assert!(version.join("tidegate-tiny/model.safetensors").is_file());

    // A file in place of the cache folder, so nothing can be written into it.
    let closed = temporary.path().join("file");
    fs::write(&closed, b"").unwrap();
    let second = generate(&closed, temporary.path());
    assert_eq!(second.stdout, first.stdout, "{}", errors(&second));
    assert!(errors(&second).contains("set XDG_CACHE_HOME"), "{}", errors(&second));
    let copies: Vec<_> = entries(temporary.path()).into_iter().filter(|path| path.is_dir()).collect();
    let [private] = &copies[..] else { panic!("one copy, found {copies:?}") };
    assert_eq!(fs::metadata(private).unwrap().permissions().mode() & 0o777, 0o700);

    let refused = generate(&closed, &closed);
    assert!(
        !refused.status.success() && errors(&refused).contains("name a model with --model"),
        "{}",
        errors(&refused)
    );
}

/// Runs `tidegate health` with these flags. The error is its standard error, if the server is not ready.
fn health(flags: &[&str], admin: &str) -> Result<(), String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    let output = command.arg("health").args(flags).env("TIDEGATE_ADMIN_ADDR", admin).output().unwrap();
    if output.status.success() { Ok(()) } else { Err(errors(&output)) }
}

#[test]
fn health_asks_the_admin_address_or_else_the_api() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let server = Server::start(&data, &["--device", "cpu", "--admin-addr", "127.0.0.1:0"]);
    let log = fs::read_to_string(data.with_extension("log")).unwrap();
    let admin = log.split_once("metrics at http://").unwrap().1.split_once(',').unwrap().0;
    let port = |address: &str| address.rsplit(':').next().unwrap().to_owned();
    assert_eq!(health(&[], admin), Ok(()));
    assert_eq!(health(&[], &format!("0.0.0.0:{}", port(admin))), Ok(()), "as the images set it");
    assert_eq!(health(&["--port", &port(&server.address)], ""), Ok(()), "an empty variable turns it off");
    server.kill();
    let error = health(&[], admin).unwrap_err();
    assert!(error.contains(&format!("error: the server at {admin} does not answer")), "{error}");
}

#[test]
fn health_says_why_a_server_is_not_ready() {
    for (answer, words) in [
        (&b"HTTP/1.0 503 Service Unavailable\r\n\r\n"[..], "is not ready: status 503"),
        (&b"\x15\x03\x01\x00\x02\x02\xff 200 "[..], "does not speak HTTP; if it uses TLS, give it an --admin-addr"),
        (&b""[..], "does not speak HTTP"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            // Reads the request, because closing a connection with unread bytes resets it.
            let _ = std::io::Read::read(&mut socket, &mut [0; 1024]).unwrap();
            socket.write_all(answer).unwrap();
        });
        let error = health(&[], &address).unwrap_err();
        assert!(error.contains(words), "{error}");
        server.join().unwrap();
    }
    let error = health(&[], "nonsense").unwrap_err();
    assert!(error.contains("--admin-addr nonsense must be ADDRESS:PORT"), "{error}");
}
