//! The table of mixers for the tests in `promises`. A new mixer needs only a new row.

/// One mixer and its configs, each a list of JSON keys for [`crate::common::config`].
pub(crate) struct Row {
    pub(crate) configs: &'static [&'static str],
    /// Configs so large that a step is split among threads.
    pub(crate) wide: &'static [&'static str],
    /// Number of tokens of the longest text. It fills every window except the one of 1,000 tokens.
    pub(crate) tokens: usize,
    /// Positions at which texts are cut: around the ends of windows, blocks and chunks.
    pub(crate) cuts: &'static [usize],
    /// Whether the mixer can verify draft tokens.
    pub(crate) speculates: bool,
    /// Impossible states of this mixer, in addition to those for every mixer.
    pub(crate) hostile: &'static [Hostile],
}

/// A description, and a function that changes one head's numbers.
pub(crate) type Hostile = (&'static str, fn(&mut [f32]));

/// Config keys of RWKV-7, and additional ones.
macro_rules! rwkv7 {
    ($more:literal) => {
        concat!(
            r#", "model_type": "rwkv7", "decay_low_rank_dim": 8, "a_low_rank_dim": 6, "v_low_rank_dim": 4"#,
            r#", "gate_low_rank_dim": 10, "#,
            $more
        )
    };
}

/// Config keys of Mamba-2 with two heads of 16, and additional ones.
macro_rules! mamba2 {
    ($more:literal) => {
        concat!(
            r#", "model_type": "mamba2", "hidden_size": 24, "intermediate_size": 32, "head_dim": 16, "state_size": 16"#,
            r#", "n_groups": 1, "#,
            $more
        )
    };
}

pub(crate) const MIXERS: [Row; 5] = [
    // Random feature attention: every feature map, and head widths that fill registers in different ways.
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
        speculates: true,
        hostile: &[],
    },
    // Softmax: windows shorter than a block, and windows of several blocks, the last of them partial.
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
        speculates: false,
        hostile: &[],
    },
    // The hybrid: windows of one token, shorter than a block, and of several blocks, the last of them partial.
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
        speculates: false,
        hostile: &[
            ("c is negative", |head| head[24 * 9] = -1e30),
            ("c is 0", |head| head[24 * 9] = 0.0),
            ("sums are 0", |head| head[..=24 * 9].fill(0.0)),
            ("sums are a ramp", |head| (0..=24 * 9).for_each(|i| head[i] = i as f32 - 100.0)),
        ],
    },
    // RWKV-7: heads of one group of columns, of several groups that do not fill a register, and of published models.
    Row {
        configs: &[
            rwkv7!(r#""hidden_size": 32, "head_dim": 16"#),
            rwkv7!(r#""hidden_size": 48, "head_dim": 48, "num_attention_heads": 1, "num_hidden_layers": 3"#),
            rwkv7!(r#""hidden_size": 128, "head_dim": 64, "tie_word_embeddings": true"#),
        ],
        wide: &[rwkv7!(r#""num_hidden_layers": 2"#)],
        tokens: 150,
        cuts: &[1, 2, 3, 63, 64, 65, 128, 149],
        speculates: true,
        hostile: &[("S is a ramp", |head| (0..head.len()).for_each(|i| head[i] = i as f32 - 100.0))],
    },
    // Mamba-2: heads that share B and C or have their own, head widths that fill registers or not, both kinds of norm.
    Row {
        configs: &[
            mamba2!(r#""tie_word_embeddings": true"#),
            mamba2!(r#""n_groups": 2, "norm_groups": 1, "use_bias": true, "conv_kernel": 3"#),
            mamba2!(
                r#""num_attention_heads": 4, "head_dim": 12, "intermediate_size": 48, "state_size": 10,
                   "n_groups": 2, "time_step_limit": [0.05, 0.8], "use_conv_bias": false"#
            ),
            mamba2!(r#""hidden_size": 32, "intermediate_size": 128, "head_dim": 64, "state_size": 128, "n_groups": 2"#),
        ],
        wide: &[mamba2!(
            r#""hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64, "state_size": 64,
               "n_groups": 4"#
        )],
        tokens: 150,
        cuts: &[1, 2, 3, 4, 63, 64, 65, 128, 149],
        speculates: true,
        hostile: &[("S is a ramp", |head| (0..head.len()).for_each(|i| head[i] = i as f32 - 100.0))],
    },
];

/// Returns every config of every mixer, with its row.
pub(crate) fn configs() -> impl Iterator<Item = (&'static Row, &'static str)> {
    MIXERS.iter().flat_map(|row| row.configs.iter().map(move |&config| (row, config)))
}
