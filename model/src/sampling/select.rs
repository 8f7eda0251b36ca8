//! Finds the highest logits of a row without sorting it.

use std::cmp::Ordering;

/// Number of logits that are examined together.
const LANES: usize = 16;

/// The highest logit, ignoring NaN; minus infinity if there is none.
pub(super) fn highest(logits: &[f32]) -> f32 {
    let higher = |best: f32, logit: f32| if logit > best { logit } else { best };
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut best = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (best, logit) in best.iter_mut().zip(chunk) {
            *best = higher(*best, *logit);
        }
    }
    best.iter().chain(rest).copied().fold(f32::NEG_INFINITY, higher)
}

/// The likeliest token; the first one if several are equal. `None` if every logit is NaN or minus infinity.
pub(super) fn greedy(logits: &[f32]) -> Option<u32> {
    let best = highest(logits);
    if best == f32::NEG_INFINITY {
        return None;
    }
    let has = |chunk: &[f32]| any(chunk, |logit| logit == best);
    let chunk = logits.chunks(4 * LANES).position(has)? * 4 * LANES;
    logits[chunk..].iter().position(|logit| *logit == best).map(|lane| (chunk + lane) as u32)
}

/// Whether `is` holds for any of a few logits. Examining all of them is faster than stopping early.
#[inline]
pub(super) fn any(logits: &[f32], is: impl Fn(f32) -> bool) -> bool {
    logits.iter().fold(false, |any, logit| any | is(*logit))
}

/// A token and its logit.
pub(super) type Scored = (u32, f32);

/// Orders the likelier token first; ties by the lower token.
pub(super) fn by_logit(a: Scored, b: Scored) -> Ordering {
    // No logit here is NaN, and the two zeros are equal.
    b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0))
}

/// Sets `best` to the `count` likeliest tokens in any order, or to all that are not NaN if there are fewer.
///
/// It makes one pass and skips chunks whose logits are all below the worst one found so far.
pub(super) fn likeliest(logits: &[f32], count: usize, best: &mut Vec<Scored>) {
    best.clear();
    let count = count.min(logits.len());
    if count == 0 {
        return;
    }
    let most = 2 * count + LANES;
    best.reserve(logits.len().min(most + LANES));
    // The lowest of the `count` logits found so far. Later ones must be higher, because the first of equals wins.
    let mut least = None;
    for (at, chunk) in logits.chunks(LANES).enumerate() {
        if least.is_some_and(|least| !any(chunk, |logit| logit > least)) {
            continue;
        }
        for (lane, &logit) in chunk.iter().enumerate() {
            if least.map_or(!logit.is_nan(), |least| logit > least) {
                best.push(((at * LANES + lane) as u32, logit));
            }
        }
        if best.len() >= most {
            least = Some(narrow(best, count));
        }
    }
    if best.len() > count {
        narrow(best, count);
    }
}

/// Reduces `best` to its `count` likeliest -> the lowest of their logits
fn narrow(best: &mut Vec<Scored>, count: usize) -> f32 {
    best.select_nth_unstable_by(count - 1, |a, b| by_logit(*a, *b));
    best.truncate(count);
    best[count - 1].1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn logit() -> impl Strategy<Value = f32> {
        // Few distinct values, so that ties are common.
        prop_oneof![
            20 => (-9i8..9).prop_map(f32::from),
            1 => Just(f32::NAN),
            1 => Just(-0.0),
            1 => Just(f32::NEG_INFINITY),
        ]
    }

    proptest! {
        #[test]
        fn the_selection_equals_that_of_a_full_sort(
            logits in prop::collection::vec(logit(), 0..400),
            count in 0usize..60,
        ) {
            let mut all: Vec<Scored> = (0..).zip(logits.iter().copied()).filter(|(_, logit)| !logit.is_nan()).collect();
            all.sort_by(|a, b| by_logit(*a, *b));
            let mut best = Vec::new();
            likeliest(&logits, count, &mut best);
            best.sort_by(|a, b| by_logit(*a, *b));
            prop_assert_eq!(&best[..], &all[..count.min(all.len())]);
            let first = all.first().filter(|(_, logit)| *logit > f32::NEG_INFINITY);
            prop_assert_eq!(greedy(&logits), first.map(|(token, _)| *token));
            prop_assert_eq!(highest(&logits), first.map_or(f32::NEG_INFINITY, |(_, logit)| *logit));
        }
    }
}
