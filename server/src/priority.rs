//! Lowers the priority of threads. By default, the engine computes on every core, so long work for one request would
//! delay the steps that all requests share.

use rustix::process::{Pid, getpriority_process, setpriority_process};

/// The amount by which a priority is lowered. On Linux, such a thread gets a tenth of a core that another thread also
/// wants, so that tokenizing a long prompt still takes less time than the engine needs for it; it gets all of an idle
/// core.
const NICE: i32 = 10;

/// The lowest priority.
const LOWEST: i32 = 19;

/// Lowers the priority of this thread for the rest of its life, because only a privileged process may raise a priority.
/// Does nothing on systems where threads have no priorities of their own.
pub(crate) fn lower_thread() {
    // On other systems, this would affect the whole process.
    if cfg!(target_os = "linux") {
        lower(None);
    }
}

/// Lowers the priority of all threads of this process for the rest of its life.
pub(crate) fn lower_process() {
    if !cfg!(target_os = "linux") {
        return lower(None);
    }
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    for id in threads.filter_map(|thread| thread.file_name().to_str()?.parse().ok()) {
        if let Some(thread) = Pid::from_raw(id) {
            lower(Some(thread));
        }
    }
}

/// Lowers the priority of a thread: of the current one if `thread` is `None`. If the system refuses, the thread keeps
/// its priority.
fn lower(thread: Option<Pid>) {
    if let Ok(now) = getpriority_process(thread) {
        let _ = setpriority_process(thread, (now + NICE).min(LOWEST));
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    #[test]
    fn only_the_thread_that_asks_gives_way() {
        let now = || getpriority_process(None).unwrap();
        let before = now();
        let lowered = std::thread::spawn(move || {
            lower_thread();
            now()
        });
        assert_eq!(lowered.join().unwrap(), (before + NICE).min(LOWEST));
        assert_eq!(now(), before);
    }
}
