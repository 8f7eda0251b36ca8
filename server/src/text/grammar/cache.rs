//! A cache of the most recent compiled grammars, because agents send the same grammar with each request.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most grammars in the cache.
const MAX_GRAMMARS: usize = 64;

/// Most bytes of all grammars together.
const MAX_BYTES: u64 = 128 << 20;

/// The least that a grammar counts for, in bytes.
const LEAST_BYTES: u64 = 64 << 10;

/// The SHA-256 digest of what was compiled.
pub(super) type Digest = [u8; 32];

struct Entry<T> {
    digest: Digest,
    bytes: u64,
    value: Arc<T>,
}

/// Values by their digests, the most recently used first.
pub(super) struct Cache<T>(Mutex<VecDeque<Entry<T>>>);

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Cache<T> {
    pub(super) fn find(&self, digest: &Digest) -> Option<Arc<T>> {
        let mut entries = self.lock();
        let at = entries.iter().position(|entry| entry.digest == *digest)?;
        let found = entries.remove(at)?;
        let value = Arc::clone(&found.value);
        entries.push_front(found);
        Some(value)
    }

    /// Adds a value of `bytes` bytes, and drops the oldest values beyond the limits. A value that is larger than the
    /// whole cache is not added: it would only drop all others.
    pub(super) fn add(&self, digest: Digest, bytes: u64, value: &Arc<T>) {
        if bytes > MAX_BYTES {
            return;
        }
        let mut entries = self.lock();
        entries.push_front(Entry { digest, bytes: bytes.max(LEAST_BYTES), value: Arc::clone(value) });
        let mut all = 0;
        let mut fits = |entry: &Entry<T>| {
            all += entry.bytes;
            all <= MAX_BYTES
        };
        let kept = entries.iter().take(MAX_GRAMMARS).take_while(|entry| fits(entry)).count();
        entries.truncate(kept);
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Entry<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(cache: &Cache<u8>) -> Vec<u8> {
        (0..=u8::MAX).filter(|digest| cache.find(&[*digest; 32]).is_some()).collect()
    }

    #[test]
    fn grammars_are_forgotten_by_count_and_by_bytes() {
        let cache = Cache::default();
        for number in 0..100 {
            cache.add([number; 32], 0, &Arc::new(number));
        }
        assert_eq!(found(&cache), (36..100).collect::<Vec<u8>>());
        cache.add([200; 32], MAX_BYTES - 10 * LEAST_BYTES, &Arc::new(200));
        assert_eq!(found(&cache).len(), 11);
        cache.add([201; 32], MAX_BYTES / 2, &Arc::new(201));
        assert_eq!(found(&cache), [201]);
        cache.add([202; 32], MAX_BYTES + 1, &Arc::new(202));
        assert_eq!(found(&cache), [201], "a value that is too large drops no other");
    }
}
