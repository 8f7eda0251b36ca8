//! Models of a hub: their names, the cache that Python's `huggingface_hub` has too, and downloads.
//!
//! `name` says what may become part of a path, `settings` reads the environment, `cache` knows the folders, `client` asks the hub,
//! `listing` reads what it answers, `choose` picks a model's files, `download` fetches one, `fetch` puts a model together, and
//! `list` describes what the cache has.

mod cache;
mod choose;
mod client;
mod download;
mod error;
mod fetch;
mod list;
mod listing;
mod name;
mod progress;
mod settings;

pub(crate) use fetch::fetch;
pub(crate) use list::print_models;
pub(crate) use name::HubName;
pub(crate) use settings::Settings;
