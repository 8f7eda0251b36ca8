//! Models of a hub: their names, the cache that Python's `huggingface_hub` has too, and downloads.
//!
//! `name` says what may become part of a path, `settings` reads the environment, `cache` knows the folders, `shared` creates what
//! is in them, `address` decides where a redirect may lead, `client` asks the hub, `listing` reads what it answers, `choose` picks a
//! model's files, `download` fetches one, `listed` the missing ones of a revision, `vocabulary` finds RWKV's vocabulary for files
//! without one, `fetch` puts a model together, and `list` describes what the cache has.

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
