//! Quantized weights are served like any others, under their own fingerprint.

use std::path::Path;

use crate::common::runs::{Run, collect, greedy};
use tidegate_server::Served;
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{Request, RequestParameters};

/// Opens `tiny`, or the pinned `tiny-q8_0` that `tidegate-weights quantize` made.
fn served(name: &str) -> Served {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/fixtures");
    open(&fixtures.join(name), &OpenOptions { slots: 2, ..OpenOptions::default() }).unwrap().0
}

fn run(served: &Served) -> Run {
    let parameters = RequestParameters { snapshot: true, ..greedy(&[0, 42, 77, 100], 12) };
    let request = Request::new(parameters, &served.limits).unwrap();
    collect(served.engine.submit(request).unwrap())
}

#[test]
fn quantised_weights_have_their_own_fingerprint() {
    let (original, quantised) = (served("tiny"), served("tiny-q8_0"));
    assert_eq!(quantised.name, "tiny-q8_0");
    assert_ne!(original.fingerprint, quantised.fingerprint);

    let (other, run) = (run(&original), run(&quantised));
    assert!(!run.ids.is_empty());
    let [other, own] = [&other, &run].map(|run| run.finish().snapshot.as_ref().unwrap());
    let (other, own) = (original.codec.encode(other), quantised.codec.encode(own));
    quantised.codec.decode(&own).unwrap();
    let error = quantised.codec.decode(&other).unwrap_err().to_string();
    assert!(error.contains("weights"), "{error}");
}
