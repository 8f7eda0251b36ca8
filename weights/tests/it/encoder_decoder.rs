//! Inspecting and quantizing an encoder-decoder.

use crate::common::{MOST, seq2seq, softmax, weights};
use serde_json::{Value, json};
use tidegate_model::checkpoint::{self, Stored};
use tidegate_model::{Decoder, Device, WeightType};
use tidegate_weights::inspect::inspect;
use tidegate_weights::quantize::{Draft, QuantizeOptions};

#[test]
fn inspection_reports_the_encoder_and_the_state_of_a_source() {
    for (keys, kept) in [(json!({}), 2 * 2 * (16 * 17 + 1) + 1), (softmax(), 2 * 2 * 2 * MOST * 16 + 1)] {
        let folder = seq2seq(&keys);
        let (report, stored) = (inspect(folder.path()).unwrap(), Stored::open(folder.path()).unwrap());
        let source = report.source.unwrap();
        assert_eq!((source.encoder_layers, source.max_tokens, source.state_bytes), (3, MOST, 4 * kept), "{keys}");
        assert!(report.state_bytes > source.state_bytes);
        assert_eq!(report.parameters, stored.config().parameters(), "{keys}");
        let group = |name: &str| report.groups.iter().find(|g| g.name == name).map_or(0, |g| g.tensors);
        // Nine tensors per layer and a norm; four projections per layer.
        assert_eq!((group("encoder"), group("cross attention"), group("other")), (3 * 9 + 1, 2 * 4, 0), "{keys}");

        let model = folder.path().display().to_string();
        let tables = String::from_utf8(weights(&["inspect", "--model", &model]).stdout).unwrap();
        for part in ["of them for the source", "layers of the encoder", "most tokens of a source", "cross attention"] {
            assert!(tables.contains(part), "{part} is not in\n{tables}");
        }
        let json: Value = serde_json::from_slice(&weights(&["inspect", "--model", &model, "--json"]).stdout).unwrap();
        assert_eq!(json["source"]["max_tokens"], MOST);
    }
    assert!(inspect(&crate::common::fixture()).unwrap().source.is_none());
}

/// Returns the logits after a source and each token of a target.
fn logits(decoder: &Decoder, source: &[u32]) -> Vec<f32> {
    let mut pool = decoder.new_pool(1).unwrap();
    decoder.read_source(source, &mut pool, 0).unwrap();
    [0, 9, 77, 210].iter().flat_map(|&id| decoder.decode(&[id], &mut pool, &[0]).unwrap()).collect()
}

#[test]
fn a_quantised_copy_decodes_like_quantising_at_load_time_and_close_to_the_original() {
    let place = tempfile::tempdir().unwrap();
    for (name, keys) in [("rfa", json!({})), ("softmax", softmax())] {
        let folder = seq2seq(&keys);
        let out = place.path().join(name);
        let options = QuantizeOptions { model: folder.path(), to: WeightType::Q8_0, out: &out };
        let report = Draft::write(&options, &mut |_| ()).unwrap().finish(None).unwrap();
        assert_eq!(report.in_f16().count(), 0, "{name}: all rows are whole blocks");
        for matrix in ["encoder.self_attn.q_proj", "encoder.mlp.down_proj", "cross_attn.v_proj"] {
            assert!(report.matrices.iter().any(|m| m.name == matrix), "{name}: {matrix} is not quantised");
        }
        let (quantised, original) =
            (checkpoint::load(&out, &Device::Cpu).unwrap(), checkpoint::load(folder.path(), &Device::Cpu).unwrap());
        let source = [0, 42, 7, 299, 100];
        let (got, want) = (logits(&quantised, &source), logits(&original, &source));
        let so = checkpoint::load_as(folder.path(), WeightType::Q8_0).unwrap();
        assert_eq!(got, logits(&so, &source), "{name}");
        let size = |x: &[f32]| x.iter().map(|v| v * v).sum::<f32>().sqrt();
        let off = |x: &[f32]| size(&x.iter().zip(&want).map(|(a, b)| a - b).collect::<Vec<_>>()) / size(&want);
        let (near, far) = (off(&got), off(&logits(&original, &[0, 42, 8, 299, 100])));
        assert!((1e-4..0.08).contains(&near), "{name}: {near}");
        assert!(far > 3.0 * near, "{name}: another source is at {far}, the copy at {near}");
    }
}
