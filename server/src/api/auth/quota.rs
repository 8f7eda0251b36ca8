//! Quotas of a key: requests per minute, tokens per minute, and concurrent requests.
//!
//! Requests are counted on arrival. Once a request for text is validated, the most tokens that it may use are reserved,
//! and it counts once for each of its texts. What it has not used is given back when it ends. So a running request is
//! never cut short, and a key never gets more than its quota.

use std::num::NonZeroU32;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use governor::RateLimiter;
use governor::clock::{Clock, DefaultClock};
use governor::middleware::StateInformationMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::sync::{Mutex, MutexGuard};

const MINUTE: Duration = Duration::from_mins(1);

/// The quota of a key; `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Quota {
    pub(super) requests_per_minute: Option<NonZeroU32>,
    pub(super) tokens_per_minute: Option<NonZeroU32>,
    pub(super) concurrent_requests: Option<NonZeroU32>,
}

/// A quota, and how much of it is used.
pub(super) struct QuotaState {
    quota: Quota,
    requests: Option<RateLimiter<NotKeyed, InMemoryState, DefaultClock, StateInformationMiddleware>>,
    tokens: Option<Mutex<TokenBucket>>,
    permits: Option<Arc<Semaphore>>,
}

/// A token bucket that refills at a constant rate, up to one minute's worth.
struct TokenBucket {
    per_minute: f64,
    balance: f64,
    updated: Instant,
}

impl TokenBucket {
    fn new(per_minute: NonZeroU32, now: Instant) -> Self {
        let per_minute = f64::from(per_minute.get());
        Self { per_minute, balance: per_minute, updated: now }
    }

    fn balance(&mut self, now: Instant) -> f64 {
        let minutes = now.saturating_duration_since(self.updated).as_secs_f64() / MINUTE.as_secs_f64();
        self.balance = (self.balance + minutes * self.per_minute).min(self.per_minute);
        self.updated = now;
        self.balance
    }

    /// Takes tokens if there are enough; returns whether there were.
    fn take(&mut self, tokens: usize, now: Instant) -> bool {
        let enough = self.balance(now) >= tokens as f64;
        if enough {
            self.balance -= tokens as f64;
        }
        enough
    }

    /// Gives tokens back.
    fn give_back(&mut self, tokens: usize, now: Instant) {
        self.balance = (self.balance(now) + tokens as f64).min(self.per_minute);
    }

    /// Time until the balance reaches `target`.
    fn time_until(&mut self, target: f64, now: Instant) -> Duration {
        let missing = (target - self.balance(now)).max(0.0);
        Duration::from_secs_f64(missing / self.per_minute * MINUTE.as_secs_f64())
    }
}

/// A request over the quota, and when to try again.
pub(super) struct QuotaExceeded {
    message: String,
    retry_after: Duration,
    requests: RequestCount,
}

impl QuotaExceeded {
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// Seconds until a retry may succeed, at least 1.
    pub(super) fn retry_after(&self) -> u64 {
        seconds(self.retry_after)
    }

    pub(super) fn requests(&self) -> &RequestCount {
        &self.requests
    }
}

/// Why a request's texts and tokens cannot be reserved, and the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    /// It has more texts than may ever run at once.
    Texts(u32),
    /// It may need more tokens than a minute has.
    Tokens(u32),
    /// Too many of the key's texts are running.
    TextsNow(u32),
    /// The key has too few tokens left now, but enough after this time.
    TokensNow(u32, Duration),
}

/// Limit, remaining requests and time until a full refill, as of when the request was counted; `None` without a limit.
#[derive(Clone, Copy, Default)]
pub(super) struct RequestCount(Option<(u32, u32, Duration)>);

impl RequestCount {
    /// Writes OpenAI's rate-limit headers.
    pub(super) fn write(&self, headers: &mut HeaderMap) {
        if let Some((limit, remaining, reset)) = self.0 {
            write(headers, ["limit-requests", "remaining-requests", "reset-requests"], limit, remaining, reset);
        }
    }
}

impl QuotaState {
    pub(super) fn new(quota: Quota) -> Self {
        let limiter = |each| RateLimiter::direct(governor::Quota::per_minute(each)).with_middleware();
        Self {
            quota,
            requests: quota.requests_per_minute.map(limiter),
            tokens: quota.tokens_per_minute.map(|most| Mutex::new(TokenBucket::new(most, Instant::now()))),
            permits: quota.concurrent_requests.map(|most| Arc::new(Semaphore::new(most.get() as usize))),
        }
    }

    pub(super) fn limits(&self) -> Quota {
        self.quota
    }

    /// Counts a request and takes a permit for it. `spends` says whether it may need tokens.
    pub(super) fn admit(&self, spends: bool) -> Result<(Option<OwnedSemaphorePermit>, RequestCount), QuotaExceeded> {
        let refuse =
            |message, retry_after| Err(QuotaExceeded { message, retry_after, requests: RequestCount::default() });
        let permit = match self.permits.as_ref().map(|permits| Arc::clone(permits).try_acquire_owned()) {
            Some(Err(_)) => {
                let most = self.quota.concurrent_requests.map_or(0, NonZeroU32::get);
                let message = format!("this API key already has {most} running requests (concurrent_requests)");
                return refuse(message, Duration::from_secs(1));
            }
            Some(Ok(permit)) => Some(permit),
            None => None,
        };
        let debt = self.tokens().map_or(Duration::ZERO, |mut bucket| bucket.time_until(1.0, Instant::now()));
        if spends && !debt.is_zero() {
            let most = self.quota.tokens_per_minute.map_or(0, NonZeroU32::get);
            let message = format!("this API key has used its {most} tokens per minute (tokens_per_minute)");
            return refuse(message, debt);
        }
        let (Some(limiter), Some(most)) = (&self.requests, self.quota.requests_per_minute) else {
            return Ok((permit, RequestCount::default()));
        };
        let each = MINUTE / most.get();
        match limiter.check() {
            Ok(state) => {
                let left = state.remaining_burst_capacity();
                Ok((permit, RequestCount(Some((most.get(), left, each * (most.get() - left))))))
            }
            Err(refused) => {
                let retry_after = refused.wait_time_from(DefaultClock::default().now());
                let message = format!("this API key has made its {most} requests per minute (requests_per_minute)");
                let requests = RequestCount(Some((most.get(), 0, MINUTE.saturating_sub(each) + retry_after)));
                Err(QuotaExceeded { message, retry_after, requests })
            }
        }
    }

    /// Reserves `tokens` for a request of `texts` texts, the first of which [`Self::admit`] has counted. The permits
    /// returned are those of the other texts.
    pub(super) fn reserve(&self, texts: usize, tokens: usize) -> Result<Option<OwnedSemaphorePermit>, Shortage> {
        let permits = match (&self.permits, self.quota.concurrent_requests) {
            (Some(permits), Some(most)) => {
                let more = u32::try_from(texts.saturating_sub(1)).ok().filter(|more| *more < most.get());
                let more = more.ok_or(Shortage::Texts(most.get()))?;
                let taken = Arc::clone(permits).try_acquire_many_owned(more);
                Some(taken.map_err(|_| Shortage::TextsNow(most.get()))?)
            }
            _ => None,
        };
        if let (Some(mut bucket), Some(most)) = (self.tokens(), self.quota.tokens_per_minute) {
            let now = Instant::now();
            if tokens > most.get() as usize {
                return Err(Shortage::Tokens(most.get()));
            }
            if !bucket.take(tokens, now) {
                return Err(Shortage::TokensNow(most.get(), bucket.time_until(tokens as f64, now)));
            }
        }
        Ok(permits)
    }

    /// Gives reserved tokens back.
    pub(super) fn give_back(&self, tokens: usize) {
        if let Some(mut bucket) = self.tokens() {
            bucket.give_back(tokens, Instant::now());
        }
    }

    /// Writes the remaining tokens as OpenAI's rate-limit headers.
    pub(super) fn write_tokens(&self, headers: &mut HeaderMap) {
        if let (Some(mut bucket), Some(most)) = (self.tokens(), self.quota.tokens_per_minute) {
            let now = Instant::now();
            let (left, reset) = (bucket.balance(now).max(0.0) as u32, bucket.time_until(f64::from(most.get()), now));
            write(headers, ["limit-tokens", "remaining-tokens", "reset-tokens"], most.get(), left, reset);
        }
    }

    fn tokens(&self) -> Option<MutexGuard<'_, TokenBucket>> {
        // No holder of the lock panics or awaits.
        self.tokens.as_ref().map(|bucket| bucket.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns the seconds to wait for `time` to pass, at least 1.
pub(super) fn seconds(time: Duration) -> u64 {
    time.as_nanos().div_ceil(1_000_000_000).clamp(1, u128::from(u64::MAX)) as u64
}

fn write(headers: &mut HeaderMap, names: [&str; 3], limit: u32, remaining: u32, reset: Duration) {
    for (name, value) in names.into_iter().zip([limit.to_string(), remaining.to_string(), duration(reset)]) {
        let name = HeaderName::try_from(format!("x-ratelimit-{name}"));
        if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
            headers.insert(name, value);
        }
    }
}

/// Formats a duration as in OpenAI's headers: `350ms`, `8s`, `1m4s`; rounded up.
fn duration(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        return format!("{}ms", time.as_micros().div_ceil(1000));
    }
    let seconds = time.as_micros().div_ceil(1_000_000);
    match (seconds / 60, seconds % 60) {
        (0, seconds) => format!("{seconds}s"),
        (minutes, seconds) => format!("{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::sync::{check, thread};

    const MINUTE_TOKENS: usize = 1_000_000;

    /// Runs requests that each reserve `each` tokens, use some and give the rest back. Refilling what a bug would lose
    /// takes most of a minute, so that the clock cannot hide it.
    fn overlap(each: usize) {
        const SPENT: usize = 20_000;
        let [minute, two] = [MINUTE_TOKENS as u32, 2].map(NonZeroU32::new);
        let quota = Quota { tokens_per_minute: minute, concurrent_requests: two, ..Quota::default() };
        let state = Arc::new(QuotaState::new(quota));
        let [running, reserved, spent]: [Arc<AtomicUsize>; 3] = Default::default();
        let threads = [0; 3].map(|_| {
            let (state, running) = (Arc::clone(&state), Arc::clone(&running));
            let (reserved, spent) = (Arc::clone(&reserved), Arc::clone(&spent));
            thread::spawn(move || {
                let Ok((permit, _)) = state.admit(true) else { return };
                assert!(running.fetch_add(1, Ordering::SeqCst) < 2, "concurrent_requests");
                if state.reserve(1, each).is_ok() {
                    let all = reserved.fetch_add(each, Ordering::SeqCst) + each;
                    assert!(all <= MINUTE_TOKENS, "tokens_per_minute: {all}");
                    thread::yield_now();
                    reserved.fetch_sub(each, Ordering::SeqCst);
                    spent.fetch_add(SPENT, Ordering::SeqCst);
                    state.give_back(each - SPENT);
                }
                running.fetch_sub(1, Ordering::SeqCst);
                drop(permit);
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
        let left = state.tokens().unwrap().balance(Instant::now());
        assert!(left >= (MINUTE_TOKENS - spent.load(Ordering::SeqCst)) as f64, "{left}");
        let permit = state.admit(true).ok().expect("all permits are free");
        assert!(state.reserve(2, 1).is_ok());
        drop(permit);
    }

    #[test]
    fn requests_that_overlap_get_no_more_than_the_quota() {
        check(|| overlap(MINUTE_TOKENS / 10 * 9));
    }

    #[test]
    fn requests_that_overlap_give_back_all_that_they_have_not_used() {
        check(|| overlap(MINUTE_TOKENS / 10 * 4));
    }

    #[test]
    fn a_bucket_gives_what_it_has_and_refills() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut bucket = TokenBucket::new(NonZeroU32::new(60).unwrap(), start);
        assert!(bucket.take(50, start) && !bucket.take(11, start));
        assert_eq!(bucket.balance(start), 10.0, "a refusal takes nothing");
        assert_eq!(bucket.time_until(40.0, start).as_secs(), 30);
        assert!(!bucket.take(40, after(29)) && bucket.take(40, after(30)));
        bucket.give_back(25, after(30));
        assert_eq!(bucket.balance(after(30)), 25.0);
        bucket.give_back(100, after(30));
        assert_eq!(bucket.balance(after(1000)), 60.0, "the balance never exceeds a minute's worth");
    }

    #[test]
    fn a_request_counts_as_many_times_as_it_has_texts() {
        let quota = Quota { concurrent_requests: NonZeroU32::new(4), ..Quota::default() };
        let state = QuotaState::new(quota);
        let first = state.admit(true).ok().unwrap();
        assert_eq!(state.reserve(5, 1).unwrap_err(), Shortage::Texts(4));
        let others = state.reserve(4, 1).unwrap();
        assert!(state.admit(true).is_err());
        drop(others);
        let second = state.admit(true).ok().unwrap();
        assert_eq!(state.reserve(4, 1).unwrap_err(), Shortage::TextsNow(4));
        assert!(state.reserve(3, 1).is_ok());
        drop((first, second));
    }

    #[test]
    fn durations_read_as_in_openais_headers() {
        let durations = [(0, "0ms"), (349_001, "350ms"), (1_000_000, "1s"), (8_000_001, "9s"), (64_000_000, "1m4s")];
        for (micros, text) in durations {
            assert_eq!(duration(Duration::from_micros(micros)), text);
        }
    }

    #[test]
    fn permits_are_released() {
        let quota = Quota { concurrent_requests: NonZeroU32::new(1), ..Quota::default() };
        let state = QuotaState::new(quota);
        let first = state.admit(true).ok().unwrap();
        assert!(state.admit(false).is_err());
        drop(first);
        assert!(state.admit(false).is_ok());
    }
}
