//! Shows the progress of a download: a bar on a terminal, otherwise lines in the log.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tracing::info;

/// Time between two lines in the log.
const INTERVAL: Duration = Duration::from_secs(10);

/// The progress of one model's download.
pub(super) struct Progress {
    model: String,
    bar: Option<ProgressBar>,
    /// Bytes of all files, of the complete ones, and of the file being downloaded.
    total: u64,
    complete: u64,
    current: u64,
    logged: Instant,
}

impl Progress {
    /// Starts the download of files with `total` bytes, of which `missing` are still to be fetched.
    pub(super) fn new(model: &str, total: u64, missing: u64) -> Self {
        let bar = (missing > 0 && stderr().is_terminal()).then(|| {
            let style = "{msg} {bar:24} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
            let bar = ProgressBar::new(total);
            bar.with_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        if missing > 0 && bar.is_none() {
            info!("downloading {model}: {} of {} are missing", size(missing), size(total));
        }
        Self { model: model.into(), bar, total, complete: 0, current: 0, logged: Instant::now() }
    }

    /// Like [`Self::new`], but shows nothing: for downloads that take almost no time.
    pub(super) fn hidden(model: &str, total: u64, _: u64) -> Self {
        Self::new(model, total, 0)
    }

    /// Starts a file, of which the cache already has `there` bytes.
    pub(super) fn start(&mut self, file: &str, there: u64) {
        self.current = there;
        if let Some(bar) = &self.bar {
            bar.set_message(file.to_owned());
            // Only bytes that arrive now count for the speed.
            bar.set_position(self.complete + there);
            bar.reset_eta();
        }
    }

    /// Counts bytes of the file that have arrived.
    pub(super) fn add(&mut self, bytes: u64) {
        self.current += bytes;
        let there = self.complete + self.current;
        match &self.bar {
            Some(bar) => bar.set_position(there),
            None if self.logged.elapsed() >= INTERVAL => {
                self.logged = Instant::now();
                info!("downloading {}: {} of {}", self.model, size(there), size(self.total));
            }
            None => {}
        }
    }

    /// Counts the file as complete.
    pub(super) fn end(&mut self, bytes: u64) {
        (self.complete, self.current) = (self.complete + bytes, 0);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Formats a number of bytes for people.
pub(super) fn size(bytes: u64) -> String {
    let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_has_the_largest_unit_that_fits() {
        let sizes = [0, 1023, 1024, 1536, 5 << 20, (3 << 30) + (1 << 29), 1 << 40].map(size);
        assert_eq!(sizes, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "3.5 GiB", "1.0 TiB"]);
    }
}
