//! Metrics of this process, read from `/proc` if the system has it.

use std::fs;

/// CPU times in `/proc` are in these ticks, whatever the kernel's own tick rate is.
const TICKS_PER_SECOND: f64 = 100.0;

/// Current values of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Process {
    pub(super) resident_bytes: Option<u64>,
    pub(super) open_fds: Option<u64>,
    pub(super) max_fds: Option<u64>,
    pub(super) threads: Option<u64>,
    pub(super) cpu_seconds: Option<f64>,
}

impl Process {
    pub(super) fn read() -> Self {
        let file = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
        let (status, limits, stat) = (file("status"), file("limits"), file("stat"));
        Self {
            resident_bytes: number(&status, "VmRSS:").map(|kib| kib * 1024),
            // Reading the folder itself opens one descriptor.
            open_fds: fs::read_dir("/proc/self/fd").ok().map(|fds| fds.count().saturating_sub(1) as u64),
            max_fds: number(&limits, "Max open files"),
            threads: number(&status, "Threads:"),
            cpu_seconds: cpu_seconds(&stat),
        }
    }
}

/// Returns the first number on the line that starts with `name`.
fn number(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the sum of utime and stime. The process name before them may contain anything; it ends at the last
/// parenthesis.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some((ticks()? + ticks()?) as f64 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_parsed() {
        assert_eq!(number("Name:\tx\nVmRSS:\t  123 kB\n", "VmRSS:"), Some(123));
        assert_eq!(number("Max open files            1024     4096    files\n", "Max open files"), Some(1024));
        assert_eq!(number("Max open files            unlimited\n", "Max open files"), None);
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 1 0 0 0 150 50 9 9 20 0 4 0 5";
        assert_eq!(cpu_seconds(stat), Some(2.0));
        assert_eq!(cpu_seconds("7"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn all_figures_of_this_process_are_available() {
        let process = Process::read();
        assert!(process.resident_bytes.unwrap() > 1 << 20 && process.open_fds.unwrap() >= 3);
        assert!(process.threads.unwrap() >= 1 && process.cpu_seconds.is_some());
    }
}
