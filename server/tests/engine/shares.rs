//! Tenants share each step: the rows of a tenant with few take part in every step, and the rows of others take turns.
//! Here, a step of `n` rows costs `2 + n`, and a chunk of `n` tokens costs `2 + n / 2`.

use std::collections::HashMap;

use tidegate_server::engine::{EventStream, FinishReason};

use super::fairness::{ABUSER, ENDLESS, POLITE, Pass, Stage};
use crate::common::runs::{collect, wait_for};

/// Returns the passes from the first step with a row of `tenant` to the last.
fn while_running(stage: &Stage, tenant: u32) -> Vec<Pass> {
    let passes = stage.passes.lock().unwrap();
    let has = |pass: &Pass| matches!(pass, Pass::Step(rows) if rows.iter().any(|(name, _)| *name == tenant));
    let (from, to) = (passes.iter().position(has).unwrap(), passes.iter().rposition(has).unwrap());
    passes[from..=to].to_vec()
}

/// Returns the rows of each decode step among `passes`.
fn steps(passes: &[Pass]) -> Vec<&[(u32, usize)]> {
    passes.iter().filter_map(|pass| if let Pass::Step(rows) = pass { Some(rows.as_slice()) } else { None }).collect()
}

fn tokens(streams: Vec<EventStream>) -> Vec<usize> {
    streams.into_iter().map(|stream| collect(stream).finish().completion_tokens).collect()
}

#[test]
fn one_row_takes_part_in_every_step_and_sixty_others_take_turns() {
    let stage = Stage::new(64, 300);
    stage.engine.expect_tenants(2);
    let held = stage.gate.lock().unwrap();
    let endless = stage.submit_with(ABUSER, 1, 60, ENDLESS).unwrap();
    let polite = stage.submit_with(POLITE, 1, 1, (1, 100)).unwrap();
    drop(held);
    assert_eq!(tokens(polite), [100]);

    let shared = while_running(&stage, POLITE);
    let shared = steps(&shared);
    assert_eq!(shared.len(), 100, "its row takes part in every step");
    let mut last: HashMap<usize, usize> = HashMap::new();
    for (at, rows) in shared.iter().enumerate() {
        assert_eq!(rows.iter().filter(|(name, _)| *name == POLITE).count(), 1);
        // A step with one row of each tenant would cost 4. The budget is twice that, and 2 of it are the step's base.
        assert_eq!(rows.len(), 6);
        for (_, slot) in rows.iter().filter(|(name, _)| *name == ABUSER) {
            if let Some(before) = last.insert(*slot, at) {
                assert!(at - before <= 60 / 5, "slot {slot} waited for {} steps", at - before);
            }
        }
    }
    assert_eq!(last.len(), 60, "each of the other rows has had its turn");
    assert!(stage.engine.stats().rows_waited > 80 * 55);

    // For some steps after the text ends, the engine expects its tenant back. After that, every step has all the other
    // rows.
    let after = || -> Vec<usize> {
        let passes = stage.passes.lock().unwrap();
        let all = steps(&passes);
        let end = all.iter().rposition(|rows| rows.iter().any(|(name, _)| *name == POLITE)).unwrap();
        all[end + 1..].iter().map(|rows| rows.len()).take(40).collect()
    };
    wait_for("steps without it", || after().len() == 40);
    assert_eq!(after(), [[6; 32].as_slice(), &[60; 8]].concat());
    drop(endless);
}

#[test]
fn tenants_with_equally_many_rows_do_not_wait_for_each_other() {
    let stage = Stage::new(64, 300);
    let gate = stage.gate.lock().unwrap();
    let streams = [1, 2, 3].map(|tenant| stage.submit_with(tenant, 1, 20, (1, 300)).unwrap());
    drop(gate);
    assert!(streams.into_iter().flat_map(tokens).all(|tokens| tokens == 300));
    let passes = stage.passes.lock().unwrap();
    // In the first steps, not all texts have slots yet, so one tenant has more rows than the others.
    assert!(steps(&passes).iter().filter(|rows| rows.len() == 60).count() >= 250);
}

#[test]
fn many_texts_get_their_slots_over_several_steps_and_another_tenant_gets_one_at_once() {
    let stage = Stage::new(64, 300);
    stage.engine.expect_tenants(3);
    let polite = stage.submit(POLITE, 1, (1, 30)).unwrap();
    let held = stage.gate.lock().unwrap();
    let many = stage.submit_with(ABUSER, 1, 60, ENDLESS).unwrap();
    let third = stage.submit_with(3, 1, 1, (1, 3)).unwrap();
    drop(held);
    // The engine notices the request at the latest when the step in progress ends.
    assert!(collect(third.into_iter().next().unwrap()).finish().timings.queue_steps <= 2);
    let resets = |between: &[Pass]| between.iter().filter(|pass| **pass == Pass::Reset).count();
    // Two of the resets happened before the first request.
    wait_for("slots for all", || resets(&stage.passes.lock().unwrap()) == 2 + 1 + 60 + 1);
    let passes = stage.passes.lock().unwrap();
    let most = passes.split(|pass| matches!(pass, Pass::Step(_))).map(resets).max();
    // Four texts get slots per step, plus one text of each tenant without a slot, plus one from before.
    assert!((4..=8).contains(&most.unwrap()), "{most:?} at once");
    drop(passes);
    drop((polite, many));
}

/// Returns the lengths of the chunks of [`ABUSER`].
fn chunks(stage: &Stage) -> Vec<usize> {
    let length = |pass: &Pass| if let Pass::Chunk(ABUSER, tokens) = pass { Some(*tokens) } else { None };
    stage.passes.lock().unwrap().iter().filter_map(length).collect()
}

#[test]
fn a_long_prompt_is_read_in_short_chunks_beside_a_row_of_another() {
    let stage = Stage::new(4, 300);
    let held = stage.gate.lock().unwrap();
    let row = stage.submit_with(POLITE, 1, 1, (1, 250)).unwrap();
    let long = stage.submit_with(ABUSER, 1, 1, (1201, 1)).unwrap();
    drop(held);
    assert_eq!((tokens(long), tokens(row)), (vec![1], vec![250]));
    // Besides the step's base, the budget is 6: 1 for the row, and 5 for a chunk of 6 tokens.
    assert_eq!(chunks(&stage), [6; 200]);
    let shared = while_running(&stage, POLITE);
    let in_a_row = shared.windows(2).filter(|pair| pair.iter().all(|pass| matches!(pass, Pass::Chunk(..)))).count();
    assert_eq!(in_a_row, 0, "the row advances between any two of them");

    // With no other tenant, the prompt is read as fast as possible.
    let stage = Stage::new(4, 300);
    assert_eq!(tokens(stage.submit(ABUSER, 1, (1025, 1)).unwrap()), [1]);
    assert_eq!(chunks(&stage), [256; 4]);
}

#[test]
fn a_chunk_ends_early_if_a_request_of_another_waits() {
    let stage = Stage::new(4, 300);
    stage.engine.expect_tenants(2);
    let held = stage.gate.lock().unwrap();
    let long = stage.submit_with(ABUSER, 1, 1, (1025, 1)).unwrap();
    wait_for("the first piece", || stage.engine.stats().running == 1);
    let polite = stage.submit_with(POLITE, 1, 1, (1, 2)).unwrap();
    drop(held);
    assert_eq!(collect(polite.into_iter().next().unwrap()).finish().timings.queue_steps, 1);
    assert_eq!(tokens(long), [1]);
    // The first chunk ends early. The next ones are short while the engine expects the other tenant back.
    assert_eq!(chunks(&stage)[..3], [32, 6, 6]);
}

#[test]
fn texts_that_wait_for_their_turn_can_be_cancelled_and_interrupted_at_once() {
    let stage = Stage::new(64, 300);
    let polite = stage.submit(POLITE, 1, ENDLESS).unwrap();
    let stop = polite[0].interrupt();
    // Reads the text on another thread, because a text that nobody reads pauses.
    let reader = std::thread::spawn(move || tokens(polite));
    let (cancelled, interrupted) =
        (stage.submit(ABUSER, 30, ENDLESS).unwrap(), stage.submit(ABUSER, 30, ENDLESS).unwrap());
    stage.passes_since(30);
    let held = stage.gate.lock().unwrap();
    let before = stage.passes.lock().unwrap().len();
    drop(cancelled);
    for stream in &interrupted {
        stream.interrupt().now();
    }
    drop(held);
    for stream in interrupted {
        assert_eq!(collect(stream).finish().reason, FinishReason::Interrupted);
    }
    stage.passes_more(3);
    assert_eq!(stage.engine.stats().cancelled, 30);
    stop.now();
    assert!(reader.join().unwrap()[0] > 0);
    let passes = stage.passes.lock().unwrap();
    // One step was in progress, and another may have begun.
    for rows in steps(&passes[before + 2..]) {
        assert!(rows.iter().all(|(name, _)| *name == POLITE), "{rows:?}");
    }
}
