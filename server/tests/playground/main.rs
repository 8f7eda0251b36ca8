//! The page in a real browser.

#[path = "../browser/mod.rs"]
mod browser;

mod key;
mod pages;
mod sessions;
