//! Properties of the estimators over many draws: RA is unbiased and RFA is not; LARA is RFA in one limit and RA in the
//! other; the noise must have unit variance. Bounds come from the draws' standard errors.

use candle_core::{DType, Device, Tensor};
use tidegate_experiments::bidirectional::naive::{Head, xi};
use tidegate_experiments::bidirectional::{
    Attention, Draws, Features, Generator, Inputs, Landmarks, Map, Weighting, estimate, features, kernel, lara, ra,
    segment_means,
};

const QUERIES: usize = 3;
const KEYS: usize = 6;
const DIM: usize = 4;
/// An unbiased mean stays within this many standard errors; with 6 means, 1 run in 20,000 exceeds it.
const WITHIN: f64 = 4.5;
/// A bias must exceed this many standard errors.
const BEYOND: f64 = 8.0;

fn like() -> Tensor {
    Tensor::zeros(1, DType::F64, &Device::Cpu).unwrap()
}

fn normals(seed: u64, shape: &[usize]) -> Tensor {
    Generator::new(seed).normals(shape, &like()).unwrap()
}

fn flat(x: &Tensor) -> Vec<f64> {
    x.flatten_all().unwrap().to_vec1().unwrap()
}

fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    flat(&(a - b).unwrap().abs().unwrap()).into_iter().fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

/// Returns inputs that prefer some keys, so that an estimated quotient is visibly biased; one copy per draw.
fn copies(draws: usize) -> Inputs {
    let tensor = |seed, tokens, width, size: f64| {
        let x = (normals(seed, &[1, 1, tokens, width]) * size).unwrap();
        x.broadcast_as((draws, 1, tokens, width)).unwrap()
    };
    Inputs::new(&tensor(1, QUERIES, DIM, 1.6), &tensor(2, KEYS, DIM, 1.6), &tensor(3, KEYS, 2, 1.0)).unwrap()
}

/// Returns the differences of the draws' mean from softmax attention, in standard errors: (queries * width).
fn deviations(inputs: &Inputs, estimates: &Tensor) -> Vec<f64> {
    let exact = flat(&Attention::Softmax.forward(inputs, &Draws::None).unwrap().narrow(0, 0, 1).unwrap());
    let estimates = flat(estimates);
    let draws = (estimates.len() / exact.len()) as f64;
    let column = |i: usize| estimates.iter().skip(i).step_by(exact.len());
    let deviation = |(i, exact): (usize, &f64)| {
        let mean = column(i).sum::<f64>() / draws;
        let variance = column(i).map(|x| (x - mean).powi(2)).sum::<f64>() / (draws - 1.0);
        (mean - exact) / (variance / draws).sqrt()
    };
    exact.iter().enumerate().map(deviation).collect()
}

fn largest(deviations: &[f64]) -> f64 {
    deviations.iter().fold(0.0, |m, d| m.max(d.abs()))
}

fn uniforms(seed: u64, draws: usize) -> Tensor {
    Generator::new(seed).uniforms(&[draws, 1, 1, QUERIES], &like()).unwrap()
}

const DRAWS: usize = 40_000;

#[test]
fn ra_is_unbiased_for_softmax_attention_and_rfa_is_not() {
    let inputs = copies(DRAWS);
    let noise = normals(4, &[DRAWS, 1, 1, QUERIES, DIM]);
    let of_ra = deviations(&inputs, &ra(&inputs, &uniforms(5, DRAWS), &noise).unwrap());
    assert!(largest(&of_ra) < WITHIN, "RA: {of_ra:?}");
    for samples in [1, 4] {
        // Positive random features of equally scaled q and k: only the sampling distribution differs.
        let of_rfa = estimate(&inputs, &normals(6, &[DRAWS, 1, samples, DIM]), None).unwrap();
        let of_rfa = deviations(&inputs, &of_rfa);
        assert!(largest(&of_rfa) > BEYOND, "RFA with {samples} samples: {of_rfa:?}");
    }
}

#[test]
fn the_noise_of_ra_has_unit_variance_after_the_scaling() {
    let inputs = copies(DRAWS);
    let noise = normals(4, &[DRAWS, 1, 1, QUERIES, DIM]);
    // Unit noise before the scaling by d^(-1/4) is noise of variance d^(-1/2) after it.
    for variance in [(DIM as f64).powf(-0.5), 2.0] {
        let noise = (&noise * variance.sqrt()).unwrap();
        let found = deviations(&inputs, &ra(&inputs, &uniforms(5, DRAWS), &noise).unwrap());
        assert!(largest(&found) > BEYOND, "variance {variance}: {found:?}");
    }
}

#[test]
fn lara_with_standard_normal_proposals_and_constant_weights_is_rfa() {
    let (tokens, count) = (12, 3);
    // Segments of opposite pairs have mean 0, so the proposals are standard normal and all weights of the balance
    // heuristic are 1/C.
    let pairs = |seed| {
        let half = normals(seed, &[2, 2, tokens / 2, 1, DIM]);
        Tensor::cat(&[&half, &half.neg().unwrap()], 3).unwrap().reshape((2, 2, tokens, DIM)).unwrap()
    };
    let inputs = Inputs::new(&pairs(1), &pairs(2), &normals(3, &[2, 2, tokens, 5])).unwrap();
    assert!(flat(&segment_means(inputs.q(), count).unwrap()).iter().all(|m| m.abs() < 1e-15));
    let w = normals(4, &[1, 2, count, DIM]);
    let noise = w.broadcast_as((2, 2, count, DIM)).unwrap();
    let Features { phi_q, phi_k, .. } = features(Map::Favor, &inputs, Some(&w.squeeze(0).unwrap())).unwrap();
    let rfa = kernel(&Features { phi_q, phi_k, weight: None }, inputs.v(), 0.0).unwrap();
    let error = distance(&lara(&inputs, &noise, Weighting::Balance, Landmarks::Segments).unwrap(), &rfa);
    assert!(error < 1e-12, "LARA: {error}");
    let error = distance(&estimate(&inputs, &noise, None).unwrap(), &rfa);
    assert!(error < 1e-12, "constant weights: {error}");
    let moved = Inputs::new(&(inputs.q() + 0.3).unwrap(), inputs.k(), inputs.v()).unwrap();
    let (lara, rfa) = (
        lara(&moved, &noise, Weighting::Balance, Landmarks::Segments).unwrap(),
        estimate(&moved, &noise, None).unwrap(),
    );
    assert!(distance(&lara, &rfa) > 1e-2, "proposals that are elsewhere make a difference");
}

#[test]
fn lara_with_each_querys_own_proposal_and_no_other_is_ra() {
    // One landmark per query, the n-th at q_n + k' with k' drawn by softmax, and each query's whole weight on its own
    // sample: the quotient reduces to RA's.
    let inputs = copies(50);
    let scaled = inputs.scaled().unwrap();
    let (noise, uniforms) = (normals(4, &[50, 1, 1, QUERIES, DIM]), uniforms(5, 50));
    let want = ra(&inputs, &uniforms, &noise).unwrap();
    let probabilities: Vec<Vec<f64>> = {
        let (q, k) = (flat(scaled.q()), flat(scaled.k()));
        let score = |q: &[f64], k: &[f64]| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>().exp();
        let row = |q: &[f64]| k[..KEYS * DIM].chunks_exact(DIM).map(|k| score(q, k)).collect::<Vec<f64>>();
        q[..QUERIES * DIM]
            .chunks_exact(DIM)
            .map(row)
            .map(|w| w.iter().map(|x| x / w.iter().sum::<f64>()).collect())
            .collect()
    };
    let chosen: Vec<u32> = flat(&uniforms)
        .iter()
        .enumerate()
        .map(|(at, u)| {
            let mut sum = 0.0;
            let above = |p: &f64| {
                sum += p;
                sum > *u
            };
            probabilities[at % QUERIES].iter().position(above).unwrap_or(KEYS - 1) as u32
        })
        .collect();
    assert!((0..KEYS as u32).filter(|m| chosen.contains(m)).count() > 2, "several keys are chosen");
    let places = Tensor::from_vec(chosen, (50, 1, QUERIES, 1), &Device::Cpu).unwrap();
    let places = places.broadcast_as((50, 1, QUERIES, DIM)).unwrap().contiguous().unwrap();
    let means = (scaled.q() + scaled.k().gather(&places, 2).unwrap()).unwrap();
    let w = (means + noise.squeeze(2).unwrap()).unwrap();
    let own: Vec<f64> =
        (0..QUERIES * QUERIES).map(|i| if i / QUERIES == i % QUERIES { 0.0 } else { f64::NEG_INFINITY }).collect();
    let own = Tensor::from_vec(own, (1, 1, QUERIES, QUERIES), &Device::Cpu).unwrap();
    let error = distance(&estimate(&inputs, &w, Some(&own)).unwrap(), &want);
    assert!(error < 1e-12, "{error}");
    assert!(distance(&estimate(&inputs, &w, None).unwrap(), &want) > 1e-2, "others' samples make a difference");
}

#[test]
fn the_balance_heuristic_estimates_the_kernel_without_bias() {
    let (tokens, count, draws) = (8, 4, 40_000);
    let (q, k) = (flat(&normals(1, &[tokens, DIM])), flat(&normals(2, &[tokens, DIM])));
    let head = Head { q: &q, k: &k, v: &k, d: DIM };
    let (mu, _) = head.landmarks(count, Landmarks::Segments);
    let scale = (DIM as f64).powf(-0.25);
    let (q, k): (Vec<f64>, Vec<f64>) =
        (q[..DIM].iter().map(|x| x * scale).collect(), k[..DIM].iter().map(|x| x * scale).collect());
    let exact = q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>().exp();
    let mut generator = Generator::new(3);
    // `plain` leaves the weights out, so its mean differs.
    let (mut weighed, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..draws {
        let (mut sum, mut unweighed) = (0.0, 0.0);
        for mu_c in mu.chunks_exact(DIM) {
            let w: Vec<f64> = mu_c.iter().map(|m| m + generator.normal()).collect();
            // alpha_c N(w; 0, I) / N(w; mu_c, I): the inverse of the sum of density ratios.
            let together: f64 = mu.chunks_exact(DIM).map(|mu| xi(mu, &w)).sum();
            sum += xi(&q, &w) * xi(&k, &w) / together;
            unweighed += xi(&q, &w) * xi(&k, &w) / count as f64;
        }
        weighed.push(sum);
        plain.push(unweighed);
    }
    let deviation = |found: &[f64]| {
        let n = found.len() as f64;
        let mean = found.iter().sum::<f64>() / n;
        let variance = found.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
        (mean - exact) / (variance / n).sqrt()
    };
    assert!(deviation(&weighed).abs() < WITHIN, "weighed: {}", deviation(&weighed));
    assert!(deviation(&plain).abs() > BEYOND, "not weighed: {}", deviation(&plain));
}

#[test]
fn proposals_near_the_tokens_gain_where_tokens_resemble_their_neighbours() {
    // Queries and keys share a slowly moving mean, which LARA's landmarks follow and RFA's samples do not.
    let (tokens, d, count, rows) = (64, 8, 8, 64);
    let shared = normals(1, &[rows, 1, count, 1, d]).broadcast_as((rows, 1, count, tokens / count, d)).unwrap();
    let shared = shared.reshape((rows, 1, tokens, d)).unwrap();
    let near = |seed| ((&shared * 1.5).unwrap() + (normals(seed, &[rows, 1, tokens, d]) * 0.3).unwrap()).unwrap();
    let inputs = Inputs::new(&near(2), &near(3), &normals(4, &[rows, 1, tokens, d])).unwrap();
    let exact = Attention::Softmax.forward(&inputs, &Draws::None).unwrap();
    let error = |name: &str| {
        let attention = Attention::named(name, count).unwrap();
        let draws = attention.draw(&inputs, &mut Generator::new(5)).unwrap();
        let out = attention.forward(&inputs, &draws).unwrap();
        flat(&(out - &exact).unwrap().sqr().unwrap().mean_all().unwrap())[0]
    };
    let [rfa, favor, balance, specific, ra] = ["rfa-softmax", "favor", "lara-balance", "lara", "ra"].map(error);
    assert!(ra < balance && ra < specific, "RA {ra}, LARA {balance}, {specific}");
    assert!(1.3 * balance.max(specific) < favor, "LARA {balance}, {specific}, FAVOR+ {favor}");
    assert!(favor < rfa, "FAVOR+ {favor}, RFA {rfa}");
}
