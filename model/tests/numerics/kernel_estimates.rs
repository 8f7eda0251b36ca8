//! Tests the feature maps as estimators of kernels, in f64: the mean, how the variance falls, the gain from orthogonal
//! rows, and how close FAVOR+ attention is to softmax attention. Bounds come from each sample's standard error.

use tidegate_model::feature_map::{FavorFeatures, Features};
use tidegate_model::mixers::rfa::{Sums, SumsShape, naive, recurrent};
use tidegate_model::random::Normals;
use tidegate_model::{Device, StateType, Tensor};

/// Maximum distance of a mean, in standard errors. About one seed in a million would exceed it.
const BOUND: f64 = 5.0;

/// `phi(x)` from x (d) and W (D, d).
type Map = fn(&[f64], &[f64]) -> Vec<f64>;

/// A kernel, and the feature map that estimates it.
struct Kernel {
    name: &'static str,
    map: Map,
    exact: fn(&[f64], &[f64]) -> f64,
}

const KERNELS: [Kernel; 3] = [
    Kernel { name: "sine and cosine", map: naive::gaussian_features, exact: gaussian },
    Kernel { name: "arc-cosine", map: naive::arc_cosine_features, exact: arc_cosine },
    Kernel { name: "positive", map: naive::favor_features, exact: exponential },
];

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn unit(x: &[f64]) -> Vec<f64> {
    let length = dot(x, x).sqrt() + 1e-3;
    x.iter().map(|v| v / length).collect()
}

/// Returns `exp(-|x^ - y^|^2 / 2)`.
fn gaussian(x: &[f64], y: &[f64]) -> f64 {
    let difference: Vec<f64> = unit(x).iter().zip(unit(y)).map(|(a, b)| a - b).collect();
    (-dot(&difference, &difference) / 2.0).exp()
}

/// Returns `|x^| |y^| (sin t + (pi - t) cos t) / (2 pi)`, where t is the angle between them.
fn arc_cosine(x: &[f64], y: &[f64]) -> f64 {
    let (x, y) = (unit(x), unit(y));
    let lengths = (dot(&x, &x) * dot(&y, &y)).sqrt();
    let angle = (dot(&x, &y) / lengths).clamp(-1.0, 1.0).acos();
    lengths * (angle.sin() + (std::f64::consts::PI - angle) * angle.cos()) / std::f64::consts::TAU
}

/// Returns `exp(x . y / sqrt(d))`.
fn exponential(x: &[f64], y: &[f64]) -> f64 {
    (dot(x, y) / (x.len() as f64).sqrt()).exp()
}

/// A mean or a variance, and its standard error.
#[derive(Clone, Copy, Debug)]
struct Estimate {
    value: f64,
    error: f64,
}

fn mean(sample: &[f64]) -> Estimate {
    let n = sample.len() as f64;
    let value = sample.iter().sum::<f64>() / n;
    let variance = sample.iter().map(|v| (v - value).powi(2)).sum::<f64>() / (n - 1.0);
    Estimate { value, error: (variance / n).sqrt() }
}

/// Returns the mean squared distance to the exact value, with its standard error.
fn squared_error(sample: &[f64], exact: f64) -> Estimate {
    mean(&sample.iter().map(|v| (v - exact).powi(2)).collect::<Vec<_>>())
}

/// Returns pairs of a query (d) and a key (d) that are near, far and nearly opposite. They are short, because estimates
/// of exponentials have heavy tails.
fn pairs(d: usize) -> Vec<(Vec<f64>, Vec<f64>)> {
    let mut normals = Normals::new(11);
    let mut random = || normals.vec(d).iter().map(|v| 0.5 * v).collect::<Vec<f64>>();
    let (a, b) = (random(), random());
    let near = a.iter().zip(random()).map(|(a, e)| a + 0.3 * e).collect();
    let opposite = a.iter().zip(random()).map(|(a, e)| 0.5 * e - a).collect();
    vec![(a.clone(), near), (a.clone(), b), (a, opposite)]
}

/// A function that draws W: (D, d).
type Draw = fn(&mut Normals, usize, usize) -> Vec<f64>;

fn independent(normals: &mut Normals, proj_dim: usize, d: usize) -> Vec<f64> {
    normals.vec(proj_dim * d)
}

fn orthogonal(normals: &mut Normals, proj_dim: usize, d: usize) -> Vec<f64> {
    normals.orthogonal_rows(proj_dim, d)
}

/// Returns `phi(x) . phi(y)` for each of `draws` draws of W.
fn sample(map: Map, draw: Draw, proj_dim: usize, draws: usize, (x, y): (&[f64], &[f64])) -> Vec<f64> {
    let mut normals = Normals::new(23);
    let estimate = |_| {
        let w = draw(&mut normals, proj_dim, x.len());
        dot(&map(x, &w), &map(y, &w))
    };
    (0..draws).map(estimate).collect()
}

const D: usize = 8;

#[test]
fn every_map_is_unbiased_with_independent_and_with_orthogonal_rows() {
    for Kernel { name, map, exact } in KERNELS {
        for (x, y) in pairs(D) {
            for draw in [independent as Draw, orthogonal] {
                let found = mean(&sample(map, draw, 16, 8000, (&x, &y)));
                let want = exact(&x, &y);
                println!("{name}: {want:.4}, found {:.4} +- {:.4}", found.value, found.error);
                assert!((found.value - want).abs() < BOUND * found.error, "{name}: {found:?}, exactly {want}");
                // The bound must be narrow enough to prove something.
                assert!(found.error < 0.05 * want.max(0.5), "{name}: {found:?}");
            }
        }
    }
}

#[test]
fn the_variance_falls_with_the_number_of_features() {
    for Kernel { name, map, exact } in KERNELS {
        let (x, y) = &pairs(D)[1];
        let errors = [4, 16, 64].map(|proj_dim| {
            let found = squared_error(&sample(map, independent, proj_dim, 4000, (x, y)), exact(x, y));
            Estimate { value: found.value * proj_dim as f64, error: found.error * proj_dim as f64 }
        });
        println!("{name}: D times the mean squared error at D = 4, 16, 64: {errors:.4?}");
        for pair in errors.windows(2) {
            let bound = BOUND * (pair[0].error.powi(2) + pair[1].error.powi(2)).sqrt();
            assert!((pair[0].value - pair[1].value).abs() < bound, "{name}: {errors:?}");
            // The bound is narrow enough to detect a factor of four.
            assert!(bound < pair[0].value, "{name}: {errors:?}");
        }
    }
}

#[test]
fn orthogonal_rows_have_less_variance_than_independent_ones() {
    for Kernel { name, map, exact } in KERNELS {
        let (x, y) = &pairs(D)[1];
        let error = |draw| squared_error(&sample(map, draw, D, 20_000, (x, y)), exact(x, y));
        let (apart, together) = (error(orthogonal as Draw), error(independent));
        println!("{name}: orthogonal {apart:.5?}, independent {together:.5?}");
        let bound = 3.0 * (apart.error.powi(2) + together.error.powi(2)).sqrt();
        assert!(apart.value + bound < together.value, "{name}: {apart:?} {together:?}");
    }
}

/// Returns the root mean square distance between the outputs of FAVOR+ and softmax attention, relative to the latter,
/// over the second half of a text. The rows of W are `stretch` times as long as they should be.
fn distance_to_softmax(proj_dim: usize, stretch: f64) -> f64 {
    let (heads, d, time) = (4, 16, 128);
    let (mut off, mut all) = (0.0, 0.0);
    for seed in 0..6 {
        let mut normals = Normals::new(seed);
        let w: Vec<f32> =
            (0..heads).flat_map(|_| normals.orthogonal_rows(proj_dim, d)).map(|v| (v * stretch) as f32).collect();
        let w = Tensor::from_vec(w, (heads, proj_dim, d), &Device::Cpu).unwrap();
        let features = Features::Favor(FavorFeatures::new(&w).unwrap());
        let qkv: Vec<f32> = normals.vec(time * 3 * heads * d).iter().map(|&v| 0.5 * v as f32).collect();
        let shape = recurrent::Shape { heads, head_dim: d, features: proj_dim, eps: 0.0 };
        let sums = SumsShape { heads, features: proj_dim, head_dim: d, maximum: true };
        let mut memory = Sums::zeros(1, sums, StateType::F32);
        let inputs = recurrent::Inputs { qkv: &qkv, gate: None, slots: &[0], positions: &[0], layer: 0 };
        let mut out = vec![f32::NAN; time * heads * d];
        recurrent::scan_alone(shape, &features, &mut memory, inputs, &mut out).unwrap();
        for head in 0..heads {
            let part = |t: usize, which: usize| {
                let numbers = &qkv[((t * 3 + which) * heads + head) * d..][..d];
                numbers.iter().map(|&v| f64::from(v)).collect::<Vec<_>>()
            };
            for last in time / 2..time {
                let of = |which| (0..=last).flat_map(|t| part(t, which)).collect::<Vec<_>>();
                let want = naive::softmax(&part(last, 0), &of(1), &of(2));
                let got = &out[(last * heads + head) * d..][..d];
                off += want.iter().zip(got).map(|(w, &g)| (w - f64::from(g)).powi(2)).sum::<f64>();
                all += dot(&want, &want);
            }
        }
    }
    (off / all).sqrt()
}

#[test]
fn the_distance_of_favor_to_softmax_attention_falls_with_the_features() {
    let right = [16, 64, 256, 1024].map(|proj_dim| distance_to_softmax(proj_dim, 1.0));
    println!("relative distance at 16, 64, 256 and 1,024 features: {right:.3?}");
    for pair in right.windows(2) {
        // Four times as many features halve the distance.
        assert!((1.5..2.7).contains(&(pair[0] / pair[1])), "{right:?}");
    }
    // A known mistake is rows of length sqrt(features) instead of sqrt(d). It gets worse with more features.
    let wrong = [16, 64, 256].map(|proj_dim| distance_to_softmax(proj_dim, (proj_dim as f64 / 16.0).sqrt()));
    println!("with rows of sqrt(features) at 16, 64 and 256: {wrong:.3?}");
    assert!(wrong[2] > wrong[1] && wrong[2] > 4.0 * right[2], "{wrong:?}");
}
