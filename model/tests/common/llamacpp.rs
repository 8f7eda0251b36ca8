//! Writes GGUF files: any metadata and tensors, and RWKV-7 and Mamba-2 models with the keys, names and shapes of
//! llama.cpp's converter (`convert_hf_to_gguf.py`).
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;

use serde_json::Value as Json;
use tidegate_model::DecoderConfig;

/// ggml's number for 32-bit floats.
pub(crate) const F32: u32 = 0;

/// A value of the metadata.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    U32(u32),
    U64(u64),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(Vec<u8>),
    Texts(Vec<Vec<u8>>),
    Words(Vec<i32>),
    Floats(Vec<f32>),
}

/// Returns a string value.
pub(crate) fn text(text: &str) -> Value {
    Value::Text(text.into())
}

impl Value {
    /// Returns GGUF's number for the type, and the bytes.
    fn encoded(&self) -> (u32, Vec<u8>) {
        match self {
            Self::U32(value) => (4, value.to_le_bytes().into()),
            Self::U64(value) => (10, value.to_le_bytes().into()),
            Self::I32(value) => (5, value.to_le_bytes().into()),
            Self::F32(value) => (6, value.to_le_bytes().into()),
            Self::Bool(value) => (7, vec![u8::from(*value)]),
            Self::Text(value) => (8, string(value)),
            Self::Texts(all) => (9, array(8, all.iter().map(|text| string(text)))),
            Self::Words(all) => (9, array(5, all.iter().map(|word| word.to_le_bytes().to_vec()))),
            Self::Floats(all) => (9, array(6, all.iter().map(|float| float.to_le_bytes().to_vec()))),
        }
    }
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

fn array(kind: u32, values: impl ExactSizeIterator<Item = Vec<u8>>) -> Vec<u8> {
    let head = [&kind.to_le_bytes()[..], &(values.len() as u64).to_le_bytes()].concat();
    values.fold(head, |mut all, value| {
        all.extend(value);
        all
    })
}

/// A tensor; the last dimension is the innermost.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) shape: Vec<usize>,
    /// ggml's number for the type.
    pub(crate) kind: u32,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// Creates a tensor of 32-bit floats.
    pub(crate) fn floats(shape: &[usize], numbers: &[f32]) -> Self {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Self { shape: shape.into(), kind: F32, bytes }
    }
}

/// The contents of a GGUF file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gguf {
    pub(crate) metadata: Vec<(String, Value)>,
    pub(crate) tensors: Vec<(String, Tensor)>,
}

impl Gguf {
    /// Sets the value of a key.
    pub(crate) fn with(mut self, key: &str, value: Value) -> Self {
        self = self.without(key);
        self.metadata.push((key.into(), value));
        self
    }

    /// Removes a key.
    pub(crate) fn without(mut self, key: &str) -> Self {
        self.metadata.retain(|(known, _)| known != key);
        self
    }

    /// Returns the tensor with this name, to change it.
    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        &mut self.tensors.iter_mut().find(|(known, _)| known == name).unwrap().1
    }

    /// Returns the bytes of the file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let counts = [self.tensors.len() as u64, self.metadata.len() as u64].map(u64::to_le_bytes).concat();
        let mut out = [&b"GGUF\x03\0\0\0"[..], &counts].concat();
        for (key, value) in &self.metadata {
            let (kind, bytes) = value.encoded();
            out.extend([string(key.as_bytes()), kind.to_le_bytes().into(), bytes].concat());
        }
        let mut offset = 0u64;
        for (name, Tensor { shape, kind, bytes }) in &self.tensors {
            out.extend(string(name.as_bytes()));
            out.extend((shape.len() as u32).to_le_bytes());
            out.extend(shape.iter().rev().flat_map(|&side| (side as u64).to_le_bytes()));
            out.extend([&kind.to_le_bytes()[..], &offset.to_le_bytes()].concat());
            offset += (bytes.len() as u64).next_multiple_of(32);
        }
        for (_, tensor) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&tensor.bytes);
        }
        out
    }
}

/// Converts an RWKV-7 model. `tensors` have their names in the folder; `tokens` begin at id 1.
pub(crate) fn rwkv7(config: &DecoderConfig, mut tensors: BTreeMap<String, Tensor>, tokens: &[Vec<u8>]) -> Gguf {
    let mut gguf = Gguf { metadata: metadata(config, tokens), tensors: Vec::new() };
    for layer in 0..config.num_hidden_layers {
        let parts = ["r", "w", "k", "v", "a", "g"];
        let parts = parts.map(|part| tensors.remove(&format!("model.layers.{layer}.attn.x_{part}")).unwrap());
        let bytes = parts.iter().flat_map(|part| part.bytes.clone()).collect();
        let fused = Tensor { shape: vec![6, 1, 1, config.hidden_size], kind: parts[0].kind, bytes };
        gguf.tensors.push((format!("blk.{layer}.time_mix_lerp_fused.weight"), fused));
    }
    for (name, mut tensor) in tensors {
        if name.ends_with("r_k") {
            tensor.shape = vec![config.hidden_size];
        }
        let name = renamed(&name);
        // The first layer has no `v` tensors, but llama.cpp expects some, so the converter copies `a`.
        if let Some(rest) = name.strip_prefix("blk.0.time_mix_a") {
            gguf.tensors.push((format!("blk.0.time_mix_v{rest}"), tensor.clone()));
        }
        gguf.tensors.push((name, tensor));
    }
    gguf
}

fn metadata(config: &DecoderConfig, tokens: &[Vec<u8>]) -> Vec<(String, Value)> {
    let ranks = config.low_ranks.unwrap();
    let size = |value: usize| Value::U32(value as u32);
    let pad = (tokens.len() + 1..config.vocab_size).map(|id| format!("[PAD{id}]").into_bytes());
    let texts: Vec<Vec<u8>> = [b"<s>".to_vec()].into_iter().chain(tokens.iter().map(|token| repr(token))).collect();
    let types = [3].into_iter().chain(tokens.iter().map(|_| 1)).chain(pad.clone().map(|_| 5)).collect();
    let metadata = [
        ("general.architecture", text("rwkv7")),
        ("general.type", text("model")),
        ("general.name", text("Tiny RWKV7")),
        ("rwkv7.context_length", size(1 << 20)),
        ("rwkv7.embedding_length", size(config.hidden_size)),
        ("rwkv7.block_count", size(config.num_hidden_layers)),
        ("rwkv7.attention.layer_norm_epsilon", Value::F32(config.rms_norm_eps as f32)),
        ("rwkv7.wkv.head_size", size(config.head_dim)),
        ("rwkv7.attention.decay_lora_rank", size(ranks.decay)),
        ("rwkv7.attention.iclr_lora_rank", size(ranks.a)),
        ("rwkv7.attention.value_residual_mix_lora_rank", size(ranks.v)),
        ("rwkv7.attention.gate_lora_rank", size(ranks.gate)),
        ("rwkv7.feed_forward_length", size(config.intermediate_size)),
        ("rwkv7.attention.head_count", size(0)),
        ("tokenizer.ggml.model", text("rwkv")),
        ("tokenizer.ggml.tokens", Value::Texts(texts.into_iter().chain(pad).collect())),
        ("tokenizer.ggml.token_type", Value::Words(types)),
        ("tokenizer.ggml.bos_token_id", size(0)),
        ("tokenizer.ggml.eos_token_id", size(0)),
        ("tokenizer.chat_template", text("rwkv-world")),
    ];
    metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// Returns the converter's name for a tensor of RWKV-7.
fn renamed(name: &str) -> String {
    let Some(name) = name.strip_prefix("model.layers.") else {
        let outside = [("model.embeddings.", "token_embd."), ("model.norm.", "output_norm."), ("lm_head.", "output.")];
        return outside.iter().fold(name.to_owned(), |name, (ours, theirs)| name.replace(ours, theirs));
    };
    if let Some(rest) = name.strip_prefix("0.pre_norm.") {
        return format!("token_embd_norm.{rest}");
    }
    let inside = [
        ("_lora.lora.0.weight", "1.weight"),
        ("_lora.lora.2.weight", "2.weight"),
        ("_lora.lora.2.bias", "0.weight"),
        (".attn.g_norm.", ".time_mix_ln."),
        (".ffn_norm.", ".attn_norm_2."),
        (".attn.", ".time_mix_"),
        ("_r_proj.", "_receptance."),
        ("_k_proj.", "_key."),
        ("_v_proj.", "_value."),
        ("_o_proj.", "_output."),
        (".ffn.x_k", ".channel_mix_lerp_k"),
        (".ffn.", ".channel_mix_"),
    ];
    let name = inside.iter().fold(format!("blk.{name}"), |name, (ours, theirs)| name.replace(ours, theirs));
    let complete = [".weight", ".bias"].iter().any(|end| name.ends_with(end));
    if complete { name } else { format!("{name}.weight") }
}

/// Converts a Mamba-2 model with these tokens. `tensors` are in f32 and have their names in the folder.
pub(crate) fn mamba2(config: &DecoderConfig, tensors: BTreeMap<String, Tensor>, tokens: &[&str]) -> Gguf {
    let (size, space) = (|value: usize| Value::U32(value as u32), config.state_space.unwrap());
    let pad = (tokens.len()..config.vocab_size).map(|id| format!("[PAD{id}]").into_bytes());
    let types = tokens.iter().map(|_| 1).chain(pad.clone().map(|_| 5)).collect();
    let texts = tokens.iter().map(|token| token.as_bytes().to_vec()).chain(pad).collect();
    let metadata = [
        ("general.architecture", text("mamba2")),
        ("general.type", text("model")),
        ("general.name", text("Tiny Mamba2")),
        ("mamba2.context_length", size(1 << 20)),
        ("mamba2.embedding_length", size(config.hidden_size)),
        ("mamba2.feed_forward_length", size(0)),
        ("mamba2.attention.head_count", size(0)),
        ("mamba2.block_count", size(config.num_hidden_layers)),
        ("mamba2.ssm.conv_kernel", size(config.conv_kernel)),
        ("mamba2.ssm.inner_size", size(config.inner_size())),
        ("mamba2.ssm.state_size", size(space.state_size)),
        ("mamba2.ssm.time_step_rank", size(config.num_attention_heads)),
        ("mamba2.ssm.group_count", size(space.n_groups)),
        ("mamba2.attention.layer_norm_rms_epsilon", Value::F32(config.rms_norm_eps as f32)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("olmo")),
        ("tokenizer.ggml.tokens", Value::Texts(texts)),
        ("tokenizer.ggml.token_type", Value::Words(types)),
        ("tokenizer.ggml.merges", Value::Texts(Vec::new())),
        ("tokenizer.ggml.bos_token_id", size(0)),
        ("tokenizer.ggml.eos_token_id", size(0)),
    ];
    let tensors = tensors.into_iter().map(|(name, mut tensor)| {
        match name.rsplit_once("mixer.").map_or("", |(_, part)| part) {
            "A_log" => {
                let logs = tensor.bytes.as_chunks::<4>().0.iter().map(|&log| f32::from_le_bytes(log));
                tensor =
                    Tensor::floats(&[config.num_attention_heads, 1], &logs.map(|log| -log.exp()).collect::<Vec<_>>());
            }
            "D" => tensor.shape = vec![config.num_attention_heads, 1],
            "conv1d.weight" => tensor.shape = vec![tensor.shape[0], tensor.shape[2]],
            "norm.weight" => tensor.shape = vec![space.n_groups, config.inner_size() / space.n_groups],
            _ => {}
        }
        let parts = [
            ("backbone.embeddings.", "token_embd."),
            ("backbone.norm_f.", "output_norm."),
            ("lm_head.", "output."),
            ("backbone.layers.", "blk."),
            (".mixer.norm.", ".ssm_norm."),
            (".norm.", ".attn_norm."),
            (".mixer.in_proj.", ".ssm_in."),
            (".mixer.out_proj.", ".ssm_out."),
            (".mixer.dt_bias", ".ssm_dt.bias"),
            (".mixer.A_log", ".ssm_a"),
            (".mixer.D", ".ssm_d"),
            (".mixer.", ".ssm_"),
        ];
        (parts.iter().fold(name, |name, (ours, theirs)| name.replace(ours, theirs)), tensor)
    });
    let metadata = metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    Gguf { metadata, tensors: tensors.collect() }
}

/// Like [`mamba2`], with the tokens and merges of a `tokenizer.json`.
pub(crate) fn mamba2_with(config: &DecoderConfig, tensors: BTreeMap<String, Tensor>, tokenizer: &Json) -> Gguf {
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let mut tokens: BTreeMap<u64, &str> =
        vocab.iter().map(|(token, id)| (id.as_u64().unwrap(), token.as_str())).collect();
    let mut types = BTreeMap::new();
    for token in tokenizer["added_tokens"].as_array().unwrap() {
        let id = token["id"].as_u64().unwrap();
        tokens.insert(id, token["content"].as_str().unwrap());
        types.insert(id, if token["special"] == true { 3 } else { 4 });
    }
    assert!(tokens.keys().copied().eq(0..tokens.len() as u64), "a token for every id");
    let pair = |merge: &Json| format!("{} {}", text_of(&merge[0]), text_of(&merge[1])).into_bytes();
    let merges = tokenizer["model"]["merges"].as_array().unwrap().iter().map(pair).collect();
    let tokens: Vec<&str> = tokens.into_values().collect();
    let mut file = mamba2(config, tensors, &tokens).with("tokenizer.ggml.merges", Value::Texts(merges));
    for (_, value) in &mut file.metadata {
        if let Value::Words(kinds) = value {
            for (id, kind) in &types {
                kinds[*id as usize] = *kind;
            }
        }
    }
    file
}

/// Like [`mamba2_with`], for a SentencePiece tokenizer, with scores in the order of the merges.
pub(crate) fn mamba2_scored(config: &DecoderConfig, tensors: BTreeMap<String, Tensor>, tokenizer: &Json) -> Gguf {
    let merges = tokenizer["model"]["merges"].as_array().unwrap().iter();
    let score = |(merge, at): (&Json, i16)| (format!("{}{}", text_of(&merge[0]), text_of(&merge[1])), f32::from(-at));
    let scores: BTreeMap<String, f32> = merges.zip(0..).map(score).collect();
    let ids = tokenizer["model"]["vocab"].as_object().unwrap();
    let mut all = vec![-1000.0; config.vocab_size];
    let mut file = mamba2_with(config, tensors, tokenizer).without("tokenizer.ggml.merges");
    for (token, id) in ids {
        let id = id.as_u64().unwrap() as usize;
        all[id] = scores.get(token).copied().unwrap_or(-1000.0);
        for (_, value) in &mut file.metadata {
            match value {
                Value::Words(kinds) if token.starts_with("<0x") => kinds[id] = 6,
                Value::Words(kinds) if token == "<unk>" => kinds[id] = 2,
                _ => {}
            }
        }
    }
    let around = [("tokenizer.ggml.bos_token_id", 1), ("tokenizer.ggml.eos_token_id", 2)];
    let file = around.into_iter().fold(file, |file, (key, id)| file.with(key, Value::U32(id)));
    file.with("tokenizer.ggml.model", text("llama"))
        .with("tokenizer.ggml.pre", text("default"))
        .with("tokenizer.ggml.scores", Value::Floats(all))
}

fn text_of(json: &Json) -> &str {
    json.as_str().unwrap()
}

/// Returns a token as Python's `repr` writes bytes, without the quotes.
pub(crate) fn repr(token: &[u8]) -> Vec<u8> {
    let both = token.contains(&b'\'') && token.contains(&b'"');
    let one = |byte: &u8| match byte {
        b'\t' => r"\t".to_owned(),
        b'\n' => r"\n".into(),
        b'\r' => r"\r".into(),
        b'\\' => r"\\".into(),
        b'\'' if both => r"\'".into(),
        b' '..=b'~' => char::from(*byte).to_string(),
        _ => format!("\\x{byte:02x}"),
    };
    token.iter().map(one).collect::<String>().into()
}
