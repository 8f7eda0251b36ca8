//! The page in a real browser.

mod browser;
mod key;
mod pages;
mod sessions;
