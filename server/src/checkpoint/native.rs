//! Tells from the start of a file, before the rest is downloaded, whether it may be RWKV-7 as its author publishes it.

/// The first bytes of a zip archive.
const ZIP: &[u8] = b"PK\x03\x04";
/// The end of the name of the archive member that has the names of all tensors.
const PICKLE: &[u8] = b"/data.pkl";
/// Maximum number of bytes before the contents of the archive's first member.
const MOST_BEFORE: usize = 512;
/// The prefix of tensor names.
const BLOCK: &str = "blocks.0.";
/// Parts of tensor names that only earlier versions of RWKV have.
const EARLIER: [&str; 2] = ["att.time_decay", "att.time_mix_k"];

/// Returns why the file `name` is not RWKV-7 as its author publishes it. `head` has its first 64 KiB, or all of it if
/// it is smaller; `None` if it may be.
pub fn refused_native(name: &str, head: &[u8]) -> Option<String> {
    let is_pth = !name.ends_with(".safetensors");
    if is_pth && !head.starts_with(ZIP) {
        return Some(format!("{name} is not a .pth file as PyTorch writes it since 1.6"));
    }
    if !is_pth && head.get(8) != Some(&b'{') {
        return Some(format!("{name} is not a file of safetensors"));
    }
    if EARLIER.into_iter().any(|part| has(head, part.as_bytes())) {
        return Some(format!("{name} is RWKV of a version before 7, which is read from folders alone"));
    }
    // PyTorch and safetensors write the names first. Other programs may order an archive differently.
    let begins_with_names = !is_pth || has(&head[..head.len().min(MOST_BEFORE)], PICKLE);
    (begins_with_names && !has(head, BLOCK.as_bytes()))
        .then(|| format!("{name} is not RWKV-7 as its author publishes it: no tensor is named {BLOCK}…"))
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_refused_by_its_beginning() {
        let fixture = std::fs::read("../model/tests/fixtures-rwkv7/package.pth").unwrap();
        assert_eq!(refused_native("x.pth", &fixture), None);
        assert_eq!(refused_native("x.pth", &fixture[..fixture.len().min(1 << 16)]), None);
        assert_eq!(refused_native("x.safetensors", b"\x40\0\0\0\0\0\0\0{\"blocks.0.att.r_k\":{}}"), None);
        let pth = |names: &str| [ZIP, &[0; 26][..], b"x/data.pkl", names.as_bytes()].concat();
        for (name, head, words) in [
            ("x.pth", b"<html>".to_vec(), "x.pth is not a .pth file as PyTorch writes it since 1.6"),
            ("x.pth", pth("emb.weight blocks.0.att.time_decay"), "x.pth is RWKV of a version before 7"),
            ("x.pth", pth("conv1.weight"), "x.pth is not RWKV-7 as its author publishes it"),
            ("x.safetensors", b"<html>".to_vec(), "x.safetensors is not a file of safetensors"),
            ("x.safetensors", b"\x40\0\0\0\0\0\0\0{\"model.norm\":{}}".to_vec(), "x.safetensors is not RWKV-7"),
        ] {
            let reason = refused_native(name, &head).unwrap();
            assert!(reason.starts_with(words), "{reason}");
        }
        // An archive whose tensor names come after the part that is read.
        assert_eq!(refused_native("x.pth", &[ZIP, &[0; 26][..], b"x/data/0", &[7; 600]].concat()), None);
    }
}
