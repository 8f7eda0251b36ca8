//! How much a key may have: requests and tokens a minute, and requests at once.
//!
//! Requests are counted as they come. Nobody knows how many tokens a request will take, so that tokens are charged as
//! they are read and made, and the budget may go below zero: then the next request waits until it is above it again.
//! A request is never cut short, and what a key can owe is bounded by its requests at once and by `max_tokens`.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use governor::clock::{Clock, DefaultClock};
use governor::middleware::StateInformationMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota as Pace, RateLimiter};
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

const MINUTE: Duration = Duration::from_mins(1);

/// What a key may have; no bound where nothing is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Quota {
    pub(super) requests_per_minute: Option<NonZeroU32>,
    pub(super) tokens_per_minute: Option<NonZeroU32>,
    pub(super) concurrent_requests: Option<NonZeroU32>,
}

/// A quota and what has been used of it.
pub(super) struct Limits {
    quota: Quota,
    requests: Option<RateLimiter<NotKeyed, InMemoryState, DefaultClock, StateInformationMiddleware>>,
    tokens: Option<Mutex<Budget>>,
    places: Option<Arc<Semaphore>>,
}

/// Tokens that are left, which come back steadily up to a minute's worth.
struct Budget {
    most: f64,
    left: f64,
    counted: Instant,
}

impl Budget {
    fn new(most: NonZeroU32, now: Instant) -> Self {
        let most = f64::from(most.get());
        Self { most, left: most, counted: now }
    }

    fn left(&mut self, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.counted);
        self.left = (self.left + passed.as_secs_f64() / MINUTE.as_secs_f64() * self.most).min(self.most);
        self.counted = now;
        self.left
    }

    fn charge(&mut self, tokens: usize, now: Instant) {
        self.left = self.left(now) - tokens as f64;
    }

    /// Time until `wanted` tokens are left.
    fn until(&mut self, wanted: f64, now: Instant) -> Duration {
        let missing = (wanted - self.left(now)).max(0.0);
        Duration::from_secs_f64(missing / self.most * MINUTE.as_secs_f64())
    }
}

/// A refusal, and when to come back.
pub(super) struct Refused {
    message: String,
    wait: Duration,
    counted: Counted,
}

impl Refused {
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// Whole seconds to wait, at least one.
    pub(super) fn seconds(&self) -> u64 {
        self.wait.as_nanos().div_ceil(1_000_000_000).clamp(1, u128::from(u64::MAX)) as u64
    }

    pub(super) fn counted(&self) -> &Counted {
        &self.counted
    }
}

/// Where a key stood when its request was counted; nothing where requests are not counted.
#[derive(Clone, Copy, Default)]
pub(super) struct Counted(Option<(u32, u32, Duration)>);

impl Counted {
    /// Says it in OpenAI's headers.
    pub(super) fn write(&self, headers: &mut HeaderMap) {
        if let Some((limit, remaining, reset)) = self.0 {
            write(headers, ["limit-requests", "remaining-requests", "reset-requests"], limit, remaining, reset);
        }
    }
}

impl Limits {
    pub(super) fn new(quota: Quota) -> Self {
        let pace = |each| RateLimiter::direct(Pace::per_minute(each)).with_middleware();
        Self {
            quota,
            requests: quota.requests_per_minute.map(pace),
            tokens: quota.tokens_per_minute.map(|most| Mutex::new(Budget::new(most, Instant::now()))),
            places: quota.concurrent_requests.map(|most| Arc::new(Semaphore::new(most.get() as usize))),
        }
    }

    pub(super) fn quota(&self) -> Quota {
        self.quota
    }

    /// Counts a request, which may need tokens (`spends`), and takes a place for it.
    pub(super) fn enter(&self, spends: bool) -> Result<(Option<OwnedSemaphorePermit>, Counted), Refused> {
        let refuse = |message, wait| Err(Refused { message, wait, counted: Counted::default() });
        let place = match self.places.as_ref().map(|places| Arc::clone(places).try_acquire_owned()) {
            Some(Err(_)) => {
                let most = self.quota.concurrent_requests.map_or(0, NonZeroU32::get);
                let message = format!("this API key has {most} requests running, which is its concurrent_requests");
                return refuse(message, Duration::from_secs(1));
            }
            Some(Ok(place)) => Some(place),
            None => None,
        };
        let owing = self.tokens().map_or(Duration::ZERO, |mut budget| budget.until(1.0, Instant::now()));
        if spends && !owing.is_zero() {
            let most = self.quota.tokens_per_minute.map_or(0, NonZeroU32::get);
            let message = format!("this API key has used up its {most} tokens a minute (tokens_per_minute)");
            return refuse(message, owing);
        }
        let (Some(limiter), Some(most)) = (&self.requests, self.quota.requests_per_minute) else {
            return Ok((place, Counted::default()));
        };
        let each = MINUTE / most.get();
        match limiter.check() {
            Ok(state) => {
                let left = state.remaining_burst_capacity();
                Ok((place, Counted(Some((most.get(), left, each * (most.get() - left))))))
            }
            Err(refused) => {
                let wait = refused.wait_time_from(DefaultClock::default().now());
                let message = format!("this API key has made its {most} requests a minute (requests_per_minute)");
                let counted = Counted(Some((most.get(), 0, MINUTE.saturating_sub(each) + wait)));
                Err(Refused { message, wait, counted })
            }
        }
    }

    /// Takes tokens from the budget.
    pub(super) fn charge(&self, tokens: usize) {
        if let Some(mut budget) = self.tokens() {
            budget.charge(tokens, Instant::now());
        }
    }

    /// Says in OpenAI's headers what is left of the tokens.
    pub(super) fn write_tokens(&self, headers: &mut HeaderMap) {
        if let (Some(mut budget), Some(most)) = (self.tokens(), self.quota.tokens_per_minute) {
            let now = Instant::now();
            let (left, reset) = (budget.left(now).max(0.0) as u32, budget.until(f64::from(most.get()), now));
            write(headers, ["limit-tokens", "remaining-tokens", "reset-tokens"], most.get(), left, reset);
        }
    }

    fn tokens(&self) -> Option<MutexGuard<'_, Budget>> {
        // Nothing panics while it holds the lock, and nobody waits for anything else meanwhile.
        self.tokens.as_ref().map(|budget| budget.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn write(headers: &mut HeaderMap, names: [&str; 3], limit: u32, remaining: u32, reset: Duration) {
    for (name, value) in names.into_iter().zip([limit.to_string(), remaining.to_string(), span(reset)]) {
        let name = HeaderName::try_from(format!("x-ratelimit-{name}"));
        if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
            headers.insert(name, value);
        }
    }
}

/// A time as OpenAI's headers give it: `350ms`, `8s`, `1m4s`; rounded up.
fn span(time: Duration) -> String {
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
    use super::*;

    #[test]
    fn tokens_that_are_owed_come_back_before_the_next_request() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut budget = Budget::new(NonZeroU32::new(60).unwrap(), start);
        assert!(budget.until(1.0, start).is_zero());
        budget.charge(90, start);
        assert_eq!(budget.left(start), -30.0);
        assert_eq!(budget.until(1.0, start).as_secs(), 31);
        assert_eq!(budget.until(1.0, after(30)).as_secs(), 1);
        assert!(budget.until(1.0, after(31)).is_zero());
        assert_eq!(budget.left(after(1000)), 60.0, "no more than a minute's worth is saved up");
    }

    #[test]
    fn times_read_as_in_openais_headers() {
        let spans = [(0, "0ms"), (349_001, "350ms"), (1_000_000, "1s"), (8_000_001, "9s"), (64_000_000, "1m4s")];
        for (micros, text) in spans {
            assert_eq!(span(Duration::from_micros(micros)), text);
        }
    }

    #[test]
    fn places_come_back() {
        let quota = Quota { concurrent_requests: NonZeroU32::new(1), ..Quota::default() };
        let limits = Limits::new(quota);
        let first = limits.enter(true).ok().unwrap();
        assert!(limits.enter(false).is_err());
        drop(first);
        assert!(limits.enter(false).is_ok());
    }
}
