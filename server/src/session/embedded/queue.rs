//! The queue of a thread that processes all waiting jobs as one group.

use std::collections::VecDeque;
use std::io;
use std::sync::PoisonError;

use crate::sync::Mutex;
use crate::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use crate::sync::thread::{Builder, JoinHandle};

/// Maximum number of jobs in one group.
const MAX_GROUP: usize = 256;

/// Maximum number of waiting jobs; further ones are refused.
pub(super) const MAX_WAITING: usize = 4096;

/// Sends jobs to the thread.
pub(super) struct Queue<J> {
    jobs: SyncSender<Message<J>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

enum Message<J> {
    Job(J),
    Stop,
}

/// Why the queue refuses a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// [`MAX_WAITING`] jobs are waiting.
    Full,
    /// The thread has stopped.
    Stopped,
}

impl<J: Send + 'static> Queue<J> {
    /// Starts the thread, which stops when the queue is dropped. `work` receives the jobs in the order in which they
    /// were sent.
    pub(super) fn start(name: &str, work: impl FnMut(Vec<J>) + Send + 'static) -> io::Result<Self> {
        let (jobs, inbox) = sync_channel(MAX_WAITING);
        let thread = Builder::new().name(name.to_owned()).spawn(move || serve(&inbox, work))?;
        Ok(Self { jobs, thread: Mutex::new(Some(thread)) })
    }

    /// Adds a job without waiting for it to run.
    pub(super) fn send(&self, job: J) -> Result<(), Refused> {
        self.jobs.try_send(Message::Job(job)).map_err(|error| match error {
            TrySendError::Full(_) => Refused::Full,
            TrySendError::Disconnected(_) => Refused::Stopped,
        })
    }

    /// Waits until the thread has done all waiting jobs and stopped.
    pub(super) fn stop(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && self.jobs.send(Message::Stop).is_ok()
        {
            drop(thread.join());
        }
    }
}

fn serve<J>(inbox: &Receiver<Message<J>>, mut work: impl FnMut(Vec<J>)) {
    let mut waiting = VecDeque::new();
    let mut stopping = false;
    while !stopping && let Ok(first) = inbox.recv() {
        for message in std::iter::once(first).chain(inbox.try_iter()) {
            match message {
                Message::Job(job) => waiting.push_back(job),
                Message::Stop => stopping = true,
            }
        }
        while !waiting.is_empty() {
            work(waiting.drain(..MAX_GROUP.min(waiting.len())).collect());
        }
    }
}

#[cfg(test)]
mod tests {
    // Recording what the test sees is not part of the model, so it uses the standard types.
    use std::sync::{Arc, Mutex as Record};

    use super::*;
    use crate::sync::{check, thread};

    /// Jobs by sender and number.
    type Jobs = Arc<Record<Vec<(u32, u32)>>>;

    #[test]
    fn what_is_accepted_before_a_stop_is_done_once_and_in_order() {
        check(|| {
            let [accepted, done]: [Jobs; 2] = Default::default();
            let record = Arc::clone(&done);
            let work = move |jobs: Vec<_>| {
                assert!(!jobs.is_empty() && jobs.len() <= MAX_GROUP);
                // The thread may be preempted here.
                thread::yield_now();
                record.lock().unwrap().extend(jobs);
            };
            let queue = Arc::new(Queue::start("queue", work).unwrap());
            let senders = [0, 1].map(|sender| {
                let (queue, accepted) = (Arc::clone(&queue), Arc::clone(&accepted));
                thread::spawn(move || {
                    for number in 0..3 {
                        match queue.send((sender, number)) {
                            Ok(()) => accepted.lock().unwrap().push((sender, number)),
                            Err(refused) => assert_eq!(refused, Refused::Stopped),
                        }
                    }
                })
            });
            thread::yield_now();
            let before = accepted.lock().unwrap().clone();
            queue.stop();
            let after = done.lock().unwrap().clone();
            assert!(before.iter().all(|job| after.contains(job)), "accepted {before:?}, done {after:?}");
            for sender in senders {
                sender.join().unwrap();
            }
            assert_eq!(*done.lock().unwrap(), after, "nothing is done once it has stopped");
            for sender in [0, 1] {
                let numbers: Vec<u32> = after.iter().filter(|job| job.0 == sender).map(|job| job.1).collect();
                assert!(numbers.iter().copied().eq(0..numbers.len() as u32), "{numbers:?}");
            }
            assert_eq!(queue.send((9, 9)), Err(Refused::Stopped));
        });
    }

    #[test]
    fn a_thread_stops_when_its_queue_is_dropped() {
        check(|| {
            let done = Arc::new(Record::new(Vec::new()));
            let record = Arc::clone(&done);
            let queue = Queue::start("queue", move |jobs: Vec<u32>| record.lock().unwrap().extend(jobs)).unwrap();
            queue.send(1).unwrap();
            let thread = queue.thread.lock().unwrap().take().unwrap();
            drop(queue);
            thread.join().unwrap();
            assert_eq!(*done.lock().unwrap(), [1]);
        });
    }
}
