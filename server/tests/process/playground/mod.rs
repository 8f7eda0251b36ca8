//! The playground in a real browser.

mod access;
mod browser;
mod chat;
mod gone;
mod key;
mod pages;
mod reload;
mod sessions;
mod texts;
