//! Writes `.pth` files as PyTorch does, zip archives with a pickle, and gives RWKV-7's tensors the names that its
//! author uses.
#![allow(dead_code, reason = "each test binary uses a part")]

/// A tensor of 32-bit floats.
#[derive(Clone, Debug)]
pub(crate) struct Floats {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) numbers: Vec<f32>,
}

/// Gives the tensors of an RWKV-7 folder the names and shapes that the author publishes, and sorts them by name.
pub(crate) fn as_published(mut tensors: Vec<Floats>) -> Vec<Floats> {
    for tensor in &mut tensors {
        let Floats { name, shape, numbers } = tensor;
        let side = shape[0];
        if name.ends_with("lora.0.weight") || name.ends_with("lora.2.weight") {
            *numbers = (0..numbers.len()).map(|at| numbers[at % side * shape[1] + at / side]).collect();
            shape.reverse();
        } else if ["lora.2.bias", "k_k", "k_a", "ffn.x_k"].iter().any(|end| name.ends_with(end)) {
            *shape = vec![1, 1, side];
        }
        let parts = [
            ("model.embeddings.", "emb."),
            ("model.norm.", "ln_out."),
            ("lm_head.", "head."),
            ("model.layers.", "blocks."),
            (".pre_norm.", ".ln0."),
            (".attn_norm.", ".ln1."),
            (".ffn_norm.", ".ln2."),
            (".g_norm.", ".ln_x."),
            (".attn.", ".att."),
            (".r_proj.", ".receptance."),
            (".k_proj.", ".key."),
            (".v_proj.", ".value."),
            (".o_proj.", ".output."),
            ("_lora.lora.2.bias", "0"),
            ("_lora.lora.0.weight", "1"),
            ("_lora.lora.2.weight", "2"),
        ];
        *name = parts.iter().fold(std::mem::take(name), |name, (ours, theirs)| name.replace(ours, theirs));
    }
    tensors.sort_by(|one, other| one.name.cmp(&other.name));
    tensors
}

/// Returns a `.pth` file of these tensors.
pub(crate) fn file(tensors: &[Floats]) -> Vec<u8> {
    around(&pickle(tensors), tensors)
}

/// Returns an archive of any pickle, with the numbers of these tensors.
pub(crate) fn around(pickle: &[u8], tensors: &[Floats]) -> Vec<u8> {
    let numbers = tensors.iter().enumerate().map(|(key, tensor)| {
        let bytes: Vec<u8> = tensor.numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        (format!("a/data/{key}"), bytes)
    });
    let numbers: Vec<_> = numbers.collect();
    let first = [("a/data.pkl", pickle, 0), ("a/byteorder", &b"little"[..], 0)];
    let rest = numbers.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice(), 0));
    archive(&first.into_iter().chain(rest).collect::<Vec<_>>())
}

/// Returns the pickle of a dictionary of tensors. Each has its own storage, named by its position.
pub(crate) fn pickle(tensors: &[Floats]) -> Vec<u8> {
    let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let sizes = |sizes: &[usize]| {
        let sizes: Vec<u8> = sizes.iter().flat_map(|&size| [b"J", &(size as u32).to_le_bytes()[..]].concat()).collect();
        [b"(", &sizes[..], b"t"].concat()
    };
    let mut out = b"\x80\x02}(".to_vec();
    for (key, Floats { name, shape, numbers }) in tensors.iter().enumerate() {
        let strides: Vec<usize> = (1..=shape.len()).map(|at| shape[at..].iter().product()).collect();
        let count = (numbers.len() as u32).to_le_bytes();
        let storage = [b"((", &text("storage")[..], b"ctorch\nFloatStorage\n", &text(&key.to_string()), &text("cpu")];
        let storage = [&storage.concat()[..], b"J", &count, b"tQK\0"].concat();
        let call = [&text(name)[..], b"ctorch._utils\n_rebuild_tensor_v2\n", &storage].concat();
        out.extend([call, sizes(shape), sizes(&strides), b"\x89ccollections\nOrderedDict\n)RtR".to_vec()].concat());
    }
    out.extend(b"u.");
    out
}

/// Returns a zip archive of uncompressed files. The third element of each is the compression method that it claims.
pub(crate) fn archive(files: &[(&str, &[u8], u16)]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes, method) in files {
        let start = out.len() as u32;
        let sizes = [(bytes.len() as u32).to_le_bytes(); 2].concat();
        let shared =
            [&[0, 0, 0, 0], &method.to_le_bytes()[..], &[0; 8], &sizes, &(name.len() as u16).to_le_bytes(), &[0; 2]]
                .concat();
        out.extend([b"PK\x03\x04", &shared[..], name.as_bytes(), bytes].concat());
        directory.extend([b"PK\x01\x02\0\0", &shared[..], &[0; 10], &start.to_le_bytes(), name.as_bytes()].concat());
    }
    let count = (files.len() as u16).to_le_bytes();
    let (start, size) = ((out.len() as u32).to_le_bytes(), (directory.len() as u32).to_le_bytes());
    out.extend(directory);
    out.extend([b"PK\x05\x06\0\0\0\0", &count[..], &count, &size, &start, &[0; 2]].concat());
    out
}
