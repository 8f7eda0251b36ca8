//! A folder with quantised weights is served like any other, and its conversations are its own.

use std::path::Path;

use crate::common::runs::{Run, collect, greedy};
use tidegate_server::Served;
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{Keep, Request, RequestParameters};

/// `tiny`, or the pinned `tiny-q8_0` that `tidegate-weights quantize` made of it.
fn served(name: &str) -> Served {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/fixtures");
    open(&fixtures.join(name), &OpenOptions { slots: 2, ..OpenOptions::default() }).unwrap().0
}

fn run(served: &Served) -> Run {
    let parameters = RequestParameters { keep: Keep { prompt: false, end: true }, ..greedy(&[0, 42, 77, 100], 12) };
    let request = Request::new(parameters, &served.limits).unwrap();
    collect(served.engine.submit(request).unwrap())
}

#[test]
fn quantised_weights_are_served_under_a_fingerprint_of_their_own() {
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
