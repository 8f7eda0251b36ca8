//! Serving: sockets, TLS and graceful shutdown. The application decides what the responses contain.

mod connections;
mod listener;
mod options;
mod requests;
mod server;
mod tls;

pub use options::ServeOptions;
pub use server::{serve, serve_with};
pub use tls::{Tls, TlsError};
