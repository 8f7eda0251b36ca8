//! Serving: sockets, TLS and graceful shutdown. The application decides what the responses contain.

mod listener;
mod options;
mod server;
mod tls;

pub use options::ServeOptions;
pub use server::{serve, serve_with};
pub use tls::{Tls, TlsError};
