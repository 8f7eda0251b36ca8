//! The definition of sampling in plain code, with every probability in f64 and sorted: the reference for the fast form.

use proptest::prelude::*;

use super::exponential::FURTHEST;
use super::processors::Candidates;

/// If differences are smaller than this, the two forms may order sums or surprises differently.
const CLOSE: f64 = 1e-6;

/// The settings of the processors.
#[derive(Clone, Copy, Debug)]
struct Narrowing {
    temperature: f32,
    top_k: usize,
    typical_p: f32,
    top_p: f32,
    min_p: f32,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    distance: f64,
    p: f64,
}

fn normalise(list: &mut [Candidate]) {
    let sum: f64 = list.iter().map(|c| c.p).sum();
    for candidate in list {
        candidate.p /= sum;
    }
}

/// Keeps the first candidates, in order of `key`, that together have `share`; `None` if rounding could decide.
fn keep(mut list: Vec<Candidate>, share: f32, key: impl Fn(&Candidate) -> f64) -> Option<Vec<Candidate>> {
    list.sort_by(|a, b| key(a).total_cmp(&key(b)).then(a.token.cmp(&b.token)));
    let near = |pair: &[Candidate]| {
        let apart = key(&pair[1]) - key(&pair[0]);
        pair[0].distance != pair[1].distance && apart < CLOSE
    };
    let mut sum = 0.0;
    let sums: Vec<f64> = list
        .iter()
        .map(|c| {
            sum += c.p;
            sum
        })
        .collect();
    if list.windows(2).any(near) || sums.iter().any(|sum| (sum - f64::from(share)).abs() < CLOSE) {
        return None;
    }
    let count = sums.iter().position(|sum| *sum >= f64::from(share)).map_or(list.len(), |last| last + 1);
    list.truncate(count);
    normalise(&mut list);
    Some(list)
}

/// The candidates, in the order of the draw.
fn plain(logits: &[f32], by: Narrowing) -> Option<Vec<Candidate>> {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let distance = |logit: f32| (f64::from(best) - f64::from(logit)) / f64::from(by.temperature);
    let all = (0..).zip(logits).map(|(token, logit)| Candidate { token, distance: distance(*logit), p: 0.0 });
    let mut list: Vec<Candidate> = all.filter(|c| c.distance <= f64::from(FURTHEST)).collect();
    list.sort_by(|a, b| a.distance.total_cmp(&b.distance).then(a.token.cmp(&b.token)));
    list.truncate(if by.top_k > 0 { by.top_k } else { list.len() });
    list.sort_by_key(|c| c.token);
    for candidate in &mut list {
        candidate.p = (-candidate.distance).exp();
    }
    normalise(&mut list);
    if by.typical_p < 1.0 {
        let entropy: f64 = list.iter().map(|c| -c.p * c.p.ln()).sum();
        list = keep(list, by.typical_p, |c| (-c.p.ln() - entropy).abs())?;
    }
    if by.top_p < 1.0 {
        list = keep(list, by.top_p, |c| c.distance)?;
    }
    let most = list.iter().map(|c| c.p).fold(0.0, f64::max) * f64::from(by.min_p);
    if list.iter().any(|c| (c.p - most).abs() < CLOSE * most && c.p < most) {
        return None;
    }
    list.retain(|c| c.p >= most);
    normalise(&mut list);
    Some(list)
}

fn share() -> impl Strategy<Value = f32> {
    prop_oneof![Just(1.0f32), 0.001f32..0.999]
}

fn logit() -> impl Strategy<Value = f32> {
    // Few distinct values, so that ties are common. Some are not candidates.
    prop_oneof![
        20 => (-60i8..60).prop_map(|eighths| f32::from(eighths) / 8.0),
        1 => Just(f32::NAN),
        1 => Just(f32::NEG_INFINITY),
        1 => Just(-100.0),
    ]
}

proptest! {
    #[test]
    fn draws_are_those_of_the_plain_definition(
        mut logits in prop::collection::vec(logit(), 1..700),
        (temperature, top_k) in (prop_oneof![Just(1.0f32), Just(0.5), Just(0.0625)], prop_oneof![Just(0usize), 1..300usize]),
        (typical_p, top_p) in (share(), share()),
        min_p in prop_oneof![Just(0.0f32), 0.001f32..0.5],
        uniforms in prop::collection::vec(0.0f64..1.0, 40),
    ) {
        logits.push(0.0);
        let narrowing = Narrowing { temperature, top_k, typical_p, top_p, min_p };
        let expected = plain(&logits, narrowing);
        prop_assume!(expected.is_some());
        let mut candidates = Candidates::default();
        candidates.fill(&logits, temperature, top_k).expect("a logit is a number");
        candidates.typical(typical_p);
        candidates.top_p(top_p);
        candidates.min_p(min_p);
        for uniform in uniforms {
            let mut sum = 0.0;
            for candidate in expected.iter().flatten() {
                let before = sum;
                sum += candidate.p;
                if before + CLOSE < uniform && uniform + CLOSE < sum {
                    prop_assert_eq!(candidates.draw(uniform), candidate.token, "{:?}", narrowing);
                }
            }
        }
    }
}
