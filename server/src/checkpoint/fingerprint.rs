//! Digests of a checkpoint's files, on which snapshots and answers depend.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};

use sha2::{Digest, Sha256};
use tidegate_model::StateType;
use tidegate_model::checkpoint::{self, FileKind};

use super::error::OpenError;
use crate::session::{Fingerprint, hex};
use crate::text::{TOOL_TEMPLATE, tokenizer_file, vocabulary_of_file};

/// The digests of a checkpoint's files.
pub(super) struct Digests {
    architecture: [u8; 32],
    weights: [u8; 32],
    tokenizer: [u8; 32],
    /// The digests of the recommended settings and the chat templates.
    beside: [[u8; 32]; 4],
}

impl Digests {
    /// Starts computing the digests on another thread while the checkpoint loads: hashing a billion weights takes
    /// seconds. `vocabulary` is RWKV's vocabulary file, for a model in one file that has none in its folder.
    pub(super) fn start(folder: &Path, vocabulary: Option<&Path>) -> Result<Pending, OpenError> {
        let wanted = Arc::new(());
        let (path, vocabulary) = (folder.to_path_buf(), vocabulary.map(Path::to_path_buf));
        let still_wanted = Arc::downgrade(&wanted);
        let of = move || Self::of(&path, vocabulary.as_deref(), &still_wanted);
        let thread = thread::Builder::new().name("digests".into()).spawn(of);
        let thread = thread.map_err(|source| OpenError::Read { path: folder.into(), source })?;
        Ok(Pending { thread, wanted })
    }

    /// Computes the digests. A missing file has a digest of zeros; the loader reports missing files that the model
    /// needs.
    fn of(folder: &Path, vocabulary: Option<&Path>, wanted: &Weak<()>) -> Result<Self, OpenError> {
        let of = |path: &Path| -> Result<_, OpenError> { Ok(digest(path, wanted)?.unwrap_or_default()) };
        let [architecture, weights, tokenizer] = if folder.is_file() {
            // A GGUF file contains all three; other files lack the vocabulary.
            let is_gguf = FileKind::of(folder)? == FileKind::Gguf;
            let vocabulary = if is_gguf { None } else { vocabulary_of_file(folder, vocabulary) };
            let file = of(folder)?;
            [file, file, vocabulary.map_or(Ok(file), |path| of(&path))?]
        } else {
            let weights = checkpoint::weights_files(folder)?;
            let digests: Vec<[u8; 32]> = weights.iter().map(|path| of(path)).collect::<Result<_, _>>()?;
            let weights = match digests.as_slice() {
                [one] => *one,
                all => Sha256::digest(all.concat()).into(),
            };
            [of(&folder.join("config.json"))?, weights, of(&tokenizer_file(folder))?]
        };
        let beside = |name: &str| of(&folder.join(name));
        let beside = [
            beside("generation_config.json")?,
            beside("tokenizer_config.json")?,
            beside("chat_template.jinja")?,
            beside(TOOL_TEMPLATE)?,
        ];
        Ok(Self { architecture, weights, tokenizer, beside })
    }

    /// Returns what a snapshot must match to be continued with this model.
    ///
    /// A rounded state continues differently from an exact one, so the number format of states is part of the
    /// architecture. So is `candle`, the model's family if candle computes it. The device is not: a session can move
    /// between the CPU and CUDA.
    pub(super) fn model(&self, state: StateType, candle: Option<&'static str>) -> Fingerprint {
        let mut architecture = self.architecture;
        if let Some(family) = candle {
            architecture = Sha256::new()
                .chain_update(architecture)
                .chain_update("by candle, ")
                .chain_update(family)
                .finalize()
                .into();
        }
        if state == StateType::Bf16 {
            architecture = Sha256::new().chain_update(architecture).chain_update("states in bf16").finalize().into();
        }
        Fingerprint { architecture: hex(&architecture), weights: hex(&self.weights), tokenizer: hex(&self.tokenizer) }
    }

    /// Returns a short name for the combination of weights, tokenizer, recommended settings, server version and device
    /// class. If it is the same, the same request and seed give the same text.
    pub(super) fn system(&self, model: &Fingerprint, class: &str) -> String {
        let mut hash = Sha256::new().chain_update(env!("CARGO_PKG_VERSION"));
        for part in [&model.architecture, &model.weights, &model.tokenizer] {
            hash.update(part);
        }
        self.beside.iter().for_each(|digest| hash.update(digest));
        hash.update(class);
        format!("fp_{}", &hex(&hash.finalize())[..16])
    }
}

/// The digests that a thread is computing. If this is dropped because the checkpoint cannot be loaded, the thread
/// stops.
pub(super) struct Pending {
    thread: JoinHandle<Result<Digests, OpenError>>,
    /// The thread runs as long as this exists.
    wanted: Arc<()>,
}

impl Pending {
    /// Waits for the digests.
    pub(super) fn wait(self) -> Result<Digests, OpenError> {
        let Self { thread, wanted } = self;
        let digests = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        drop(wanted);
        digests
    }
}

/// Returns the SHA-256 of a file; `None` if there is no such file, or if the digest is no longer wanted.
fn digest(path: &Path, wanted: &Weak<()>) -> Result<Option<[u8; 32]>, OpenError> {
    let failed = |source| OpenError::Read { path: path.into(), source };
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        if wanted.strong_count() == 0 {
            return Ok(None);
        }
        match file.read(&mut buffer).map_err(failed)? {
            0 => return Ok(Some(hash.finalize().into())),
            count => hash.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_sha_256() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        let wanted = Arc::new(());
        let of = || digest(&path, &Arc::downgrade(&wanted)).unwrap();
        assert_eq!(of(), None);
        std::fs::write(&path, "abc").unwrap();
        assert!(hex(&of().unwrap()).starts_with("ba7816bf8f01cfea414140de5dae2223"));
    }

    /// Otherwise, the thread would read an endless file forever.
    #[test]
    #[cfg(unix)]
    fn digests_that_nobody_waits_for_are_stopped() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/zero", folder.path().join("model.safetensors")).unwrap();
        let Pending { thread, wanted } = Digests::start(folder.path(), None).unwrap();
        drop(wanted);
        assert_eq!(thread.join().unwrap().unwrap().weights, [0; 32]);
    }

    #[test]
    fn the_fingerprint_covers_the_weights_that_are_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let digests = || Digests::start(folder.path(), None).unwrap().wait().unwrap();
        let of = |state| digests().model(state, None);
        let fingerprint = || of(StateType::F32);
        write("config.json", "{}");
        write("model.gguf", "quantised");
        let quantised = fingerprint();
        write("model.gguf", "quantised otherwise");
        let otherwise = fingerprint();
        assert_ne!(quantised.weights, otherwise.weights);
        assert_eq!(quantised.architecture, otherwise.architecture);
        // If both files exist, the safetensors file is loaded.
        write("model.safetensors", "quantised");
        assert_eq!(fingerprint(), quantised);
        // Rounded states continue differently.
        assert_ne!(of(StateType::Bf16).architecture, quantised.architecture);
        assert_eq!(of(StateType::Bf16).weights, quantised.weights);
        // Candle keeps its states in another form, and its results differ in the last bits.
        let by = |family| digests().model(StateType::F32, family);
        let [mamba, rwkv] = ["mamba", "rwkv6"].map(|family| by(Some(family)).architecture);
        assert!(mamba != rwkv && mamba != quantised.architecture);
        let system = |model: &Fingerprint, class: &str| digests().system(model, class);
        assert_ne!(system(&quantised, "cpu"), system(&otherwise, "cpu"));
        // Another device may give another text, but continues the same sessions; so may other files beside the weights.
        assert_ne!(system(&quantised, "cpu"), system(&quantised, "cuda NVIDIA H200"));
        std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        for name in ["generation_config.json", "tokenizer_config.json", "chat_template.jinja", TOOL_TEMPLATE] {
            let before = system(&quantised, "cpu");
            write(name, "other");
            assert_ne!(system(&quantised, "cpu"), before, "{name}");
        }
    }

    #[test]
    fn the_fingerprint_covers_a_vocabulary_file() {
        let folder = tempfile::tempdir().unwrap();
        let of = |text: &str| {
            std::fs::write(folder.path().join("rwkv_vocab_v20230424.txt"), text).unwrap();
            Digests::start(folder.path(), None).unwrap().wait().unwrap().model(StateType::F32, None).tokenizer
        };
        assert_ne!(of("1 'a' 1"), of("1 'b' 1"));
    }
}
