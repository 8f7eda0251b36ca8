//! Log probabilities of generated tokens, on a scripted model and on the shipped checkpoint.

use std::time::Duration;

use crate::common::checkpoint;
use crate::common::fake::Fake;
use crate::common::runs::{Run, collect, greedy, run, shipped, start};
use tidegate_model::{Device, SamplingParams};
use tidegate_server::engine::{Limits, Request, RequestParameters, TokenLogprobs};

fn sampled(prompt: &str, seed: u64) -> RequestParameters {
    let served = shipped();
    // Each of these can change which token is chosen, but none may change a log probability.
    let sampling = SamplingParams {
        temperature: 0.8,
        top_p: 0.9,
        repetition_penalty: 1.3,
        frequency_penalty: 0.5,
        logit_bias: vec![(17, 3.0), (300, -5.0)],
        seed,
        ..SamplingParams::default()
    };
    let prompt = served.tokenizer.encode(prompt).unwrap();
    RequestParameters { prompt, max_tokens: 24, sampling, logprobs: Some(5), ..RequestParameters::default() }
}

fn runs(requests: impl IntoIterator<Item = RequestParameters>) -> Vec<Run> {
    let served = shipped();
    let requests = requests.into_iter().map(|request| Request::new(request, &served.limits).unwrap()).collect();
    served.engine.submit_all(requests).unwrap().into_iter().map(collect).collect()
}

/// Returns the log softmax of a row, computed by its definition.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    logits.iter().map(|logit| f64::from(*logit) - sum.ln()).collect()
}

#[test]
fn log_probabilities_are_those_of_the_models_logits_before_any_sampling_parameter() {
    let (engine, _thread) = start(Fake::new(2));
    let sampling = SamplingParams { logit_bias: vec![(7, 50.0)], temperature: 0.0, ..SamplingParams::default() };
    let parameters = RequestParameters { sampling, logprobs: Some(2), ..greedy(&[1], 3) };
    let output = run(&engine, parameters.clone());
    assert_eq!(output.ids, [7, 7, 7]);
    let sum = (255.0 + 1f64.exp()).ln();
    let (likely, unlikely) = ((1.0 - sum) as f32, -sum as f32);
    let entry = |top| TokenLogprobs { token: 7, logprob: unlikely, top };
    let first = entry(vec![(2, likely), (0, unlikely)]);
    let later = entry(vec![(8, likely), (0, unlikely)]);
    assert_eq!(output.logprobs, [first, later.clone(), later]);
    assert_eq!(output.finish().cumulative_logprob, Some(3.0 * f64::from(unlikely)));

    let none = run(&engine, RequestParameters { logprobs: Some(0), ..parameters.clone() });
    assert!(none.logprobs.len() == 3 && none.logprobs.iter().all(|scored| scored.top.is_empty()));
    let without = run(&engine, RequestParameters { logprobs: None, ..parameters });
    assert_eq!((without.logprobs.len(), without.finish().cumulative_logprob), (0, None));
}

#[test]
fn a_client_that_reads_late_gets_a_log_probability_for_each_token() {
    let (engine, _thread) = start(Fake::new(1));
    let request = RequestParameters { logprobs: Some(1), ignore_eos: true, ..greedy(&[0], 1000) };
    let stream = engine.submit(Request::new(request, &crate::common::runs::LIMITS).unwrap()).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let output = collect(stream);
    assert_eq!(output.ids.len(), 1000);
    assert_eq!(output.logprobs.iter().map(|scored| scored.token).collect::<Vec<_>>(), output.ids);
}

#[test]
fn log_probabilities_of_the_shipped_model_are_the_log_softmax_of_its_logits() {
    let output = runs([sampled("Once upon a time", 5)]).remove(0);
    let decoder = tidegate_model::checkpoint::load(&checkpoint(), &Device::Cpu).unwrap();
    let mut pool = decoder.new_pool(1).unwrap();
    let prompt = sampled("Once upon a time", 5).prompt;
    let mut logits = decoder.prefill_logits(&prompt, &mut pool, 0).unwrap();
    let mut sum = 0.0;
    for (id, scored) in output.ids.iter().zip(&output.logprobs) {
        let expected = log_softmax(&logits);
        assert!((f64::from(scored.logprob) - expected[*id as usize]).abs() < 1e-6);
        let mut order: Vec<u32> = (0..expected.len() as u32).collect();
        order.sort_by(|a, b| expected[*b as usize].total_cmp(&expected[*a as usize]).then(a.cmp(b)));
        assert_eq!(scored.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), order[..5]);
        assert!(scored.top.iter().all(|(token, p)| (f64::from(*p) - expected[*token as usize]).abs() < 1e-6));
        sum += f64::from(scored.logprob);
        logits = decoder.decode(&[*id], &mut pool, &[0]).unwrap();
    }
    assert_eq!(output.logprobs.len(), output.ids.len());
    assert_eq!(output.finish().cumulative_logprob, Some(sum));
}

#[test]
fn log_probabilities_have_the_same_bits_alone_and_in_a_batch() {
    let prompts = ["Once upon a time", "The café was", "A", "“Where have you been?” output"];
    let requests = |i: usize| sampled(prompts[i], i as u64);
    let together = runs((0..4).map(requests));
    for (i, together) in together.iter().enumerate() {
        let alone = runs([requests(i)]).remove(0);
        assert_eq!((&alone.ids, &alone.logprobs), (&together.ids, &together.logprobs));
        assert!(!alone.logprobs.is_empty());
    }
}

#[test]
fn the_error_names_the_bound() {
    let limits = Limits { vocab_size: 256, max_prompt_tokens: 4, max_tokens: 10, sources: None };
    let error = |logprobs| Request::new(RequestParameters { logprobs, ..greedy(&[1], 1) }, &limits).unwrap_err();
    assert_eq!(error(Some(21)).to_string(), "logprobs must be from 0 to 20, found 21");
    assert_eq!(error(Some(usize::MAX)).parameter(), "logprobs");
    assert!(Request::new(RequestParameters { logprobs: Some(20), ..greedy(&[1], 1) }, &limits).is_ok());
}
