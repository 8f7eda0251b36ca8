//! Attention over all keys: every batched form against the reference and PyTorch, its gradients, and its stability.

use std::path::Path;

use candle_core::{DType, Device, Tensor, Var};
use tidegate_experiments::bidirectional::naive::{self, Head};
use tidegate_experiments::bidirectional::{
    Attention, DENOMINATOR_EPS, Draws, Generator, Inputs, Landmarks, Weighting, crossing, lara, ra,
};
use tidegate_model::mixers::rfa::naive as reference;

const BATCH: usize = 2;
const HEADS: usize = 3;
const QUERIES: usize = 11;
const KEYS: usize = 14;
const DIM: usize = 8;
const WIDTH: usize = 5;
const SAMPLES: usize = 6;

fn inputs(dtype: DType, size: f64) -> Inputs {
    let mut generator = Generator::new(7);
    let like = Tensor::zeros(1, DType::F64, &Device::Cpu).unwrap();
    let mut tensor = |tokens, width| generator.normals(&[BATCH, HEADS, tokens, width], &like).unwrap();
    let (q, k, v) = (tensor(QUERIES, DIM), tensor(KEYS, DIM), tensor(KEYS, WIDTH));
    let to = |x: Tensor| x.to_dtype(dtype).unwrap();
    Inputs::new(&to((q * size).unwrap()), &to((k * size).unwrap()), &to(v)).unwrap()
}

fn flat(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

/// Returns the reference result for one head of one row.
fn reference_of(name: &str, head: &Head<'_, f64>, draws: &Draws, at: usize) -> Vec<f64> {
    let part = |x: &Tensor, of: usize, parts: usize| {
        let all = flat(x);
        let len = all.len() / parts;
        all[of * len..][..len].to_vec()
    };
    let kernel = |phi: &dyn Fn(&[f64]) -> Vec<f64>, floor: &dyn Fn(&[f64]) -> f64| head.kernel(phi, floor);
    let keys = (head.k.len() / head.d) as f64;
    let half = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>() / (DIM as f64).sqrt() / 2.0;
    match draws {
        Draws::None if name == "softmax" => head.softmax(),
        Draws::None => kernel(&reference::elu_features, &|_| 0.0),
        Draws::Matrices(w) => {
            let w = part(w, at % HEADS, HEADS);
            match name {
                "rfa" => kernel(&|x| reference::gaussian_features(x, &w), &|_| DENOMINATOR_EPS * keys),
                "rfa-arccos" => kernel(&|x| reference::arc_cosine_features(x, &w), &|_| 0.0),
                "favor" => kernel(&|x| reference::favor_features(x, &w), &|_| 0.0),
                _ => kernel(&|x| naive::trigonometric(x, &w), &|q| {
                    let weights: f64 = head.k.chunks_exact(DIM).map(|k| half(k).exp()).sum();
                    DENOMINATOR_EPS * weights * half(q).exp()
                }),
            }
        }
        Draws::Landmarks(normals) => {
            let normals = part(normals, at, BATCH * HEADS);
            match name {
                "lara-balance" => head.lara_balance(&normals),
                "lara" | "lara-means" => head.lara(&normals, Landmarks::Segments),
                "lara-means-tokens" => head.lara(&normals, Landmarks::Tokens),
                _ => head.lara(&normals, Landmarks::Crossed),
            }
        }
        Draws::Queries { normals, uniforms } => {
            head.ra(&part(uniforms, at, BATCH * HEADS), &part(normals, at, BATCH * HEADS))
        }
    }
}

#[test]
fn batched_forms_are_the_plain_ones() {
    for (dtype, tolerance) in [(DType::F64, 1e-11), (DType::F32, 2e-5)] {
        for name in Attention::NAMES {
            let attention = Attention::named(name, SAMPLES).unwrap();
            let inputs = inputs(dtype, 1.2);
            let draws = attention.draw(&inputs, &mut Generator::new(3)).unwrap();
            let fast = attention.forward(&inputs, &draws).unwrap();
            assert_eq!(fast.dims(), [BATCH, HEADS, QUERIES, WIDTH]);
            let (q, k, v) = (flat(inputs.q()), flat(inputs.k()), flat(inputs.v()));
            let plain: Vec<f64> = (0..BATCH * HEADS)
                .flat_map(|at| {
                    let head = Head {
                        q: &q[at * QUERIES * DIM..][..QUERIES * DIM],
                        k: &k[at * KEYS * DIM..][..KEYS * DIM],
                        v: &v[at * KEYS * WIDTH..][..KEYS * WIDTH],
                        d: DIM,
                    };
                    reference_of(name, &head, &draws, at)
                })
                .collect();
            let error = distance(&flat(&fast), &plain);
            let size = plain.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            // A floored denominator of a signed estimate magnifies rounding errors of the numerator.
            assert!(error < tolerance * size.max(1.0), "{name} in {dtype:?}: {error} of {size}");
        }
    }
}

#[test]
fn samples_at_the_means_are_not_random_and_differ_by_landmarks() {
    let inputs = inputs(DType::F64, 1.2);
    let outputs: Vec<Vec<f64>> = ["lara-means", "lara-means-tokens", "lara-means-crossed"]
        .map(|name| {
            let attention = Attention::named(name, SAMPLES).unwrap();
            let out = |seed| {
                let draws = attention.draw(&inputs, &mut Generator::new(seed)).unwrap();
                flat(&attention.forward(&inputs, &draws).unwrap())
            };
            assert_eq!(out(1), out(2), "{name}");
            out(1)
        })
        .into();
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        assert!(distance(&outputs[a], &outputs[b]) > 1e-3);
    }
    assert_eq!([1, 2, 7, 8, 16, 64].map(crossing), [(1, 1), (1, 2), (1, 7), (2, 4), (4, 4), (8, 8)]);
}

#[test]
fn names_are_known() {
    assert_eq!(
        Attention::named("lara", 4),
        Some(Attention::Lara {
            landmarks: 4,
            weighting: Weighting::QuerySpecific,
            at: Landmarks::Segments,
            noise: true
        })
    );
    assert_eq!(Attention::named("ra", 4), Some(Attention::Ra { samples: 4 }));
    assert_eq!(Attention::named("linformer", 4), None);
}

#[test]
fn long_queries_and_keys_overflow_nothing() {
    // Exponents of several hundred, whose exponentials overflow f32.
    let inputs = inputs(DType::F32, 25.0);
    for name in Attention::NAMES {
        let attention = Attention::named(name, SAMPLES).unwrap();
        let draws = attention.draw(&inputs, &mut Generator::new(3)).unwrap();
        let out = flat(&attention.forward(&inputs, &draws).unwrap());
        assert!(out.iter().all(|x| x.is_finite()), "{name}: {out:?}");
    }
}

#[test]
fn long_keys_do_not_make_favor_blind() {
    // All keys are long, so their features vanish unless the maximum is taken over whole exponents.
    let wide = inputs(DType::F64, 0.8);
    let long = (wide.k() * 30.0).unwrap();
    let favor = Attention::named("favor", SAMPLES).unwrap();
    let draws = favor.draw(&wide, &mut Generator::new(3)).unwrap();
    let Draws::Matrices(w) = &draws else { panic!("{draws:?}") };
    let want = flat(&favor.forward(&Inputs::new(wide.q(), &long, wide.v()).unwrap(), &draws).unwrap());
    let narrow = |x: &Tensor| x.to_dtype(DType::F32).unwrap();
    let inputs = Inputs::new(&narrow(wide.q()), &narrow(&long), &narrow(wide.v())).unwrap();
    let got = flat(&favor.forward(&inputs, &Draws::Matrices(narrow(w))).unwrap());
    assert!(want.iter().all(|h| h.abs() > 1e-6), "the truth itself is blind: {want:?}");
    assert!(want.iter().zip(&got).all(|(w, g)| (w - g).abs() < 1e-3), "{want:?} {got:?}");
}

#[test]
fn gradients_are_those_of_small_differences() {
    let given = inputs(DType::F64, 0.8);
    let mut generator = Generator::new(11);
    let weights = generator.normals(&[BATCH, HEADS, QUERIES, WIDTH], given.q()).unwrap();
    for name in Attention::NAMES {
        let attention = Attention::named(name, SAMPLES).unwrap();
        let draws = attention.draw(&given, &mut Generator::new(3)).unwrap();
        let loss = |x: [&Tensor; 3]| {
            let out = attention.forward(&Inputs::new(x[0], x[1], x[2]).unwrap(), &draws).unwrap();
            (out * &weights).unwrap().sum_all().unwrap()
        };
        let vars = [given.q(), given.k(), given.v()].map(|x| Var::from_tensor(x).unwrap());
        let gradients = loss([&vars[0], &vars[1], &vars[2]]).backward().unwrap();
        for (which, var) in vars.iter().enumerate() {
            let gradient = flat(gradients.get(var).unwrap_or_else(|| panic!("{name}: input {which} has no gradient")));
            let values = flat(var);
            for at in (0..values.len()).step_by(values.len() / 7) {
                let step = 1e-5;
                let moved = |by: f64| {
                    let mut values = values.clone();
                    values[at] += by;
                    let x = Tensor::from_vec(values, var.dims(), &Device::Cpu).unwrap();
                    let mut all = [given.q(), given.k(), given.v()];
                    all[which] = &x;
                    loss(all).to_scalar::<f64>().unwrap()
                };
                let want = (moved(step) - moved(-step)) / (2.0 * step);
                let found = gradient[at];
                assert!((found - want).abs() < 1e-6 * want.abs().max(1.0), "{name}, input {which}: {found} for {want}");
            }
        }
    }
}

#[test]
fn shapes_and_draws_that_do_not_fit_are_refused() {
    let given = inputs(DType::F32, 1.0);
    let (q, k, v) = (given.q(), given.k(), given.v());
    assert!(Inputs::new(q, v, v).is_err());
    assert!(Inputs::new(q, k, &v.narrow(2, 0, 3).unwrap()).is_err());
    assert!(Inputs::new(q, k, &v.to_dtype(DType::F64).unwrap()).is_err());
    let too_many = Attention::named("lara", QUERIES + 1).unwrap();
    let draws = too_many.draw(&given, &mut Generator::new(1)).unwrap();
    let message = too_many.forward(&given, &draws).unwrap_err().to_string();
    assert!(message.contains("must be 1 to 11 segments, found 12"), "{message}");
    let other = Attention::named("favor", 4).unwrap();
    assert!(other.forward(&given, &draws).is_err(), "draws of another attention");
    let draws = Attention::named("favor", 5).unwrap().draw(&given, &mut Generator::new(1)).unwrap();
    assert!(other.forward(&given, &draws).is_err(), "as many draws as samples");
}

#[test]
fn pytorch_agrees() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/randomized.safetensors");
    let golden = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let inputs = Inputs::new(&golden["q"], &golden["k"], &golden["v"]).unwrap();
    let agree = |name: &str, found: &Tensor| {
        let want = flat(&golden[name]);
        let spread = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        assert!(spread > 0.3, "{name}: figures without contrast prove nothing");
        let error = distance(&flat(found), &want);
        assert!(error < 1e-5, "{name}: {error}");
    };
    agree("softmax", &Attention::Softmax.forward(&inputs, &Draws::None).unwrap());
    let (normals, segments) = (&golden["lara_normals"], Landmarks::Segments);
    agree("lara", &lara(&inputs, normals, Weighting::QuerySpecific, segments).unwrap());
    agree("lara_balance", &lara(&inputs, normals, Weighting::Balance, segments).unwrap());
    let means = Attention::named("lara-means", normals.dim(2).unwrap()).unwrap();
    let draws = means.draw(&inputs, &mut Generator::new(1)).unwrap();
    agree("lara_means", &means.forward(&inputs, &draws).unwrap());
    agree("ra", &ra(&inputs, &golden["ra_uniforms"], &golden["ra_normals"]).unwrap());
}
