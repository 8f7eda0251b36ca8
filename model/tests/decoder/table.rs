//! The table of mixers that the promises run over: a new mixer is one row.

/// One mixer and its configs, each a list of JSON keys for [`crate::common::config`].
pub(crate) struct Row {
    pub(crate) configs: &'static [&'static str],
    /// Configs so large that a step is shared among threads.
    pub(crate) wide: &'static [&'static str],
    /// Tokens of the longest text: longer than every window.
    pub(crate) tokens: usize,
    /// Where texts are cut: around the ends of windows, blocks and chunks.
    pub(crate) cuts: &'static [usize],
    /// States that no text has made, besides those that every mixer must survive.
    pub(crate) hostile: &'static [Hostile],
}

/// A name, and a change of one head's numbers.
pub(crate) type Hostile = (&'static str, fn(&mut [f32]));

pub(crate) const MIXERS: [Row; 3] = [
    // Random feature attention: every feature map; widths of heads that fill registers in different ways.
    Row {
        configs: &[
            "",
            r#", "conv_kernel": 4, "output_norm": true, "tie_word_embeddings": true"#,
            r#", "position_embedding": "rope""#,
            r#", "gate": false, "conv_kernel": 3"#,
            r#", "feature_map": "arc_cosine""#,
            r#", "feature_map": "arc_cosine", "gate": false, "position_embedding": "rope""#,
            r#", "feature_map": "elu", "proj_dim": 0"#,
            r#", "feature_map": "elu", "proj_dim": 0, "gate": false, "position_embedding": "rope""#,
            r#", "feature_map": "favor", "output_norm": true"#,
            r#", "feature_map": "favor", "gate": false, "position_embedding": "rope""#,
            r#", "head_dim": 16"#,
            r#", "head_dim": 48"#,
            r#", "head_dim": 64, "proj_dim": 64"#,
        ],
        wide: &[
            r#", "num_attention_heads": 8, "proj_dim": 64"#,
            r#", "num_attention_heads": 8, "proj_dim": 64, "feature_map": "favor""#,
            r#", "num_attention_heads": 8, "proj_dim": 0, "feature_map": "elu""#,
        ],
        tokens: 150,
        cuts: &[1, 2, 3, 63, 64, 65, 100, 128, 130, 149],
        hostile: &[],
    },
    // Softmax: windows of less than a block, and of several blocks of which the last is not full.
    Row {
        configs: &[
            r#", "attention": "softmax", "sliding_window": 1"#,
            r#", "attention": "softmax", "sliding_window": 40, "position_embedding": "none", "conv_kernel": 4"#,
            r#", "attention": "softmax", "sliding_window": 300, "output_norm": true"#,
            r#", "attention": "softmax", "sliding_window": 1000"#,
        ],
        wide: &[r#", "attention": "softmax", "sliding_window": 700"#],
        tokens: 610,
        cuts: &[1, 39, 40, 41, 256, 300, 301, 556],
        hostile: &[],
    },
    // The hybrid: windows of one token, of less than a block, and of several blocks of which the last is not full.
    Row {
        configs: &[
            r#", "attention": "hybrid", "sliding_window": 1"#,
            r#", "attention": "hybrid", "sliding_window": 40, "position_embedding": "none", "conv_kernel": 4"#,
            r#", "attention": "hybrid", "sliding_window": 70, "gate": false, "tie_word_embeddings": true"#,
            r#", "attention": "hybrid", "sliding_window": 300, "output_norm": true"#,
        ],
        wide: &[r#", "attention": "hybrid", "sliding_window": 300, "proj_dim": 64"#],
        tokens: 410,
        cuts: &[1, 39, 40, 41, 111, 256, 300, 301],
        hostile: &[
            ("c is negative", |head| head[24 * 9] = -1e30),
            ("c is 0", |head| head[24 * 9] = 0.0),
            ("sums are 0", |head| head[..=24 * 9].fill(0.0)),
            ("sums are a ramp", |head| (0..=24 * 9).for_each(|i| head[i] = i as f32 - 100.0)),
        ],
    },
];

/// Every config of every mixer, with its row.
pub(crate) fn configs() -> impl Iterator<Item = (&'static Row, &'static str)> {
    MIXERS.iter().flat_map(|row| row.configs.iter().map(move |&config| (row, config)))
}
