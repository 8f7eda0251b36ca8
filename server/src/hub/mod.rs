//! Models of a hub: their names, the cache that is shared with Python's `huggingface_hub`, and downloads.
//!
//! `name` says what may become part of a path, `settings` reads the environment, `cache` knows the folders, `shared`
//! creates files and folders in them, `address` decides where a redirect may lead, `client` sends requests to the hub,
//! `listing` reads the answers, `choose` picks a model's files, `download` fetches one file, `listed` fetches the
//! missing files of a revision, `vocabulary` finds RWKV's vocabulary for files without one, `fetch` assembles a model,
//! and `list` lists the cached models.
//!
//! The client is our own because the crate `hf-hub`, read around version 1.0, starts an interrupted HTTP download again
//! from its first byte and does not compare the file with a digest. It would also bring an asynchronous HTTP client,
//! `reqwest`, into builds that need none.

mod address;
mod cache;
mod choose;
mod client;
mod download;
mod error;
mod fetch;
mod list;
mod listed;
mod listing;
mod name;
mod progress;
mod settings;
mod shared;
mod vocabulary;

pub(crate) use fetch::{Fetched, fetch};
pub(crate) use list::print_models;
pub(crate) use name::HubName;
pub(crate) use settings::Settings;
pub(crate) use shared::share_cache;
pub(crate) use vocabulary::{VOCABULARY, Vocabulary};
