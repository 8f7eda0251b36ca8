//! States in bf16 promise what states in f32 do: cut anywhere, with anyone, in any slot, moved anywhere, a text gives
//! the same bits; and what they give is near what f32 gives.

use crate::common::{Numbers, decoder, distance};
use tidegate_model::{Decoder, PoolOptions, StatePool, StateType, Threads};

fn pool(decoder: &Decoder, slots: usize) -> StatePool {
    decoder.new_pool_with(PoolOptions { state: StateType::Bf16, ..PoolOptions::new(slots) }).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Widths of heads for which the kernel pads, takes a group, a pair and a group, and two pairs of columns.
const WIDTHS: [&str; 4] = ["", r#", "head_dim": 16"#, r#", "head_dim": 48"#, r#", "head_dim": 64, "proj_dim": 64"#];

/// The other feature maps.
const MAPS: [&str; 6] = [
    r#", "feature_map": "arc_cosine""#,
    r#", "feature_map": "arc_cosine", "gate": false"#,
    r#", "feature_map": "elu", "proj_dim": 0"#,
    r#", "feature_map": "elu", "proj_dim": 0, "gate": false"#,
    r#", "feature_map": "favor""#,
    r#", "feature_map": "favor", "gate": false"#,
];

#[test]
fn however_a_text_came_in_its_state_is_the_same_bits() {
    for keys in WIDTHS.into_iter().chain(MAPS) {
        one_text_two_ways(&decoder(keys, 3), 1);
        one_text_two_ways(&decoder(keys, 3), 3);
    }
    one_text_two_ways(&decoder(r#", "conv_kernel": 4"#, 3), 1);
}

fn one_text_two_ways(decoder: &Decoder, threads: usize) {
    let ids = Numbers::new(4).ids(150, 61);
    let threads = Threads::new(threads).into();
    let mut pool = decoder.new_pool_with(PoolOptions { slots: 4, threads, state: StateType::Bf16 }).unwrap();
    let whole = decoder.prefill(&ids, &mut pool, 0).unwrap();
    decoder.absorb(&ids[..70], &mut pool, 3).unwrap();
    let mut cut = Vec::new();
    for &id in &ids[70..] {
        // Another text beside it, in another slot.
        cut = decoder.decode(&[7, id], &mut pool, &[1, 3]).unwrap()[61..].to_vec();
    }
    assert_eq!(bits(&whole), bits(&cut));
    assert_eq!(bits(&pool.export(0).unwrap()), bits(&pool.export(3).unwrap()));
}

#[test]
fn a_state_that_moved_goes_on_as_if_it_had_never_left() {
    for keys in [""].into_iter().chain(MAPS) {
        moved(&decoder(keys, 5));
    }
}

fn moved(decoder: &Decoder) {
    let ids = Numbers::new(6).ids(90, 61);
    let (mut here, mut there) = (pool(decoder, 1), pool(decoder, 2));
    decoder.absorb(&ids[..60], &mut here, 0).unwrap();
    let numbers = here.export(0).unwrap();
    there.import(1, &numbers, here.tokens(0)).unwrap();
    assert_eq!(bits(&there.export(1).unwrap()), bits(&numbers));
    let (stayed, moved) = (decoder.prefill(&ids[60..], &mut here, 0), decoder.prefill(&ids[60..], &mut there, 1));
    assert_eq!(bits(&stayed.unwrap()), bits(&moved.unwrap()));
}

#[test]
fn half_the_bytes_give_nearly_the_same_logits() {
    nearly_the_same(&decoder("", 7), 0.05);
    for keys in MAPS {
        // Without a gate the sums grow with the text, and with them what a token's rounding adds.
        nearly_the_same(&decoder(keys, 7), if keys.contains("gate") { 0.2 } else { 0.05 });
    }
}

fn nearly_the_same(decoder: &Decoder, most: f32) {
    let ids = Numbers::new(8).ids(400, 61);
    let (mut half, mut full) = (pool(decoder, 1), decoder.new_pool(1).unwrap());
    let want = decoder.prefill(&ids, &mut full, 0).unwrap();
    let error = distance(&decoder.prefill(&ids, &mut half, 0).unwrap(), &want);
    assert!(error > 0.0 && error < most, "{error}, at most {most}");
    // z and c stay f32.
    assert!(half.state_bytes() > full.state_bytes() / 2 && half.state_bytes() < full.state_bytes() * 6 / 10);
}
