//! The cost of translation, on a model so small that only the form of the measurements is checked.

use tidegate_experiments::record::Record;
use tidegate_experiments::translation_cost::{Options, Row, Shape, config, measure, steps};
use tidegate_model::WeightType;

fn options() -> Options {
    let shape = Shape {
        hidden: 16,
        intermediate: 24,
        layers: 2,
        heads: 2,
        head_dim: 8,
        vocabulary: 40,
        weights: WeightType::F32,
    };
    Options { shape, lengths: vec![2, 50], batch: 3, tokens: 4, rounds: 3 }
}

#[test]
fn both_mixers_are_measured_at_every_length_in_turn() {
    let (options, mut seen) = (options(), Vec::new());
    let rows = measure(&options, &mut |what| seen.push(what.to_owned())).unwrap();
    assert_eq!(seen.len() as u64, steps(&options));
    assert_eq!(seen[..2], ["round 1 of 3: rfa-gate at 2", "round 1 of 3: softmax at 2"]);
    assert_eq!(seen[4..6], ["round 2 of 3: softmax at 2", "round 2 of 3: rfa-gate at 2"], "neither is always first");
    let cases: Vec<_> = rows.iter().map(|row| (row.mixer.as_str(), row.source, row.batch)).collect();
    assert_eq!(cases, [("rfa-gate", 2, 3), ("softmax", 2, 3), ("rfa-gate", 50, 3), ("softmax", 50, 3)]);
    for row in &rows {
        assert!(0.0 < row.low && row.low <= row.tokens_per_second && row.tokens_per_second <= row.high, "{row:?}");
        assert!(row.read_ms > 0.0 && row.state_bytes_filled <= row.state_bytes, "{row:?}");
        assert_eq!(row.over_softmax.is_some(), row.mixer == "rfa-gate");
    }
    // Two attentions of two heads of two layers: S (16, 8), z, c.
    assert_eq!((rows[0].state_bytes_filled, rows[0].state_bytes), (rows[2].state_bytes, 4 * 2 * 2 * 2 * (16 * 9 + 1)));
    // Keys and values of the source, and of a target of 2 + 4 tokens.
    assert_eq!([rows[1].state_bytes_filled, rows[3].state_bytes_filled], [8, 56].map(|tokens| 4 * 2 * 2 * 16 * tokens));
    assert_eq!(rows[1].state_bytes, rows[3].state_bytes);

    let folder = tempfile::tempdir().unwrap();
    let path =
        Record::of_now("translation-cost", &[], serde_json::Map::new(), rows.clone()).write(folder.path()).unwrap();
    let read = Record::<Row>::read(&path, "translation-cost").unwrap().rows;
    assert_eq!(read.iter().map(|row| (row.mixer.as_str(), row.source, row.batch)).collect::<Vec<_>>(), cases);
    let error = Record::<Row>::read(&path, "translation").unwrap_err().to_string();
    assert!(error.contains("must be translation, found translation-cost"), "{error}");
}

#[test]
fn the_twins_differ_only_in_the_decoders_attentions() {
    let options = options();
    let [rfa, softmax] = ["rfa-gate", "softmax"].map(|mixer| config(mixer, &options).unwrap());
    assert_eq!((rfa.mixer(), softmax.mixer()), ("rfa-gate", "softmax"));
    assert_eq!(rfa.source(), softmax.source());
    // Gates of two layers; sigmas of two attentions each.
    assert_eq!(rfa.parameters() - softmax.parameters(), 2 * (2 * 17 + 2 * 16));
    let base = Options::default();
    let parameters = config("softmax", &base).unwrap().parameters();
    assert!((40_000_000..60_000_000).contains(&parameters), "about the transformer base: {parameters}");
}

#[test]
fn errors_name_what_cannot_be_measured() {
    let error = |change: fn(&mut Options)| {
        let mut options = options();
        change(&mut options);
        measure(&options, &mut |_| ()).unwrap_err().to_string()
    };
    for change in [
        (|o| o.lengths.clear()) as fn(&mut Options),
        |o| o.lengths.push(0),
        |o| o.batch = 0,
        |o| o.tokens = 0,
        |o| o.rounds = 0,
    ] {
        assert!(error(change).contains("must be at least 1"), "{}", error(change));
    }
    assert!(error(|o| o.lengths.push(65_537)).contains("max_source_positions"));
    let message = error(|o| (o.lengths, o.batch) = (vec![65_536], 20_000));
    assert!(message.contains("lengths and batch") && message.contains("softmax"), "{message}");
}
