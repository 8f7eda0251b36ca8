//! Compiles the kernels for CUDA, where that feature is on: with nvcc to PTX where there is one, else their source goes
//! into the program, in one piece, for NVRTC. For the emulator the same source is compiled for the host.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo::rustc-check-cfg=cfg(tidegate_ptx)");
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo names a folder for what is built"));
    println!("cargo::rerun-if-changed=cuda");
    let source = out.join("kernels.cu");
    fs::write(&source, whole(Path::new("cuda/kernels.cu"), &mut Vec::new())).expect("the kernels' source");
    for name in ["CUDA_HOME", "CUDA_PATH", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if let Some(nvcc) = nvcc() {
        // The oldest that the kernels run on, and the oldest that lets a kernel start before the last one has ended: the
        // driver makes machine code of them for its own device.
        for architecture in ["80", "90"] {
            let ptx = out.join(format!("kernels-{architecture}.ptx"));
            let mut command = Command::new(&nvcc);
            // Fused only where the source says so: kernels that must give the same bits are not left to the compiler's choice.
            command.args(["-std=c++17", "-fmad=false", "-ptx", "-o"]).args([&ptx, &source]);
            command.arg(format!("-arch=compute_{architecture}"));
            let status = command.status().unwrap_or_else(|error| panic!("{}: {error}", nvcc.display()));
            assert!(status.success(), "{} did not compile the kernels", nvcc.display());
        }
        println!("cargo::rustc-cfg=tidegate_ptx");
    }
    #[cfg(feature = "cuda-emulator")]
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        // One product and one sum are two roundings, as the source says; a fused one is written `fmaf`.
        .flag("-ffp-contract=off")
        // The kernels read halves sixteen bytes at a time.
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        .files(["cuda/host/emulator.cpp", "cuda/host/registry.cpp"])
        .compile("tidegate_kernels_on_host");
}

/// nvcc of the toolkit that the environment names, that is installed, or that is on the path.
fn nvcc() -> Option<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    // Where NVIDIA's packages put it.
    let homes = named.chain([PathBuf::from("/usr/local/cuda")]).map(|home| home.join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    homes.chain(env::split_paths(&path)).map(|folder| folder.join("nvcc")).find(|file| file.is_file())
}

/// A source with what it includes of our own in its place, each once: NVRTC has no folders to look into.
fn whole(file: &Path, seen: &mut Vec<PathBuf>) -> String {
    if seen.iter().any(|other| other == file) {
        return String::new();
    }
    seen.push(file.to_owned());
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let folder = file.parent().unwrap_or(Path::new(""));
    let line = |line: &str| match line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"')) {
        // The emulator is no part of what a GPU is given.
        Some(name) if !name.starts_with("host/") => whole(&folder.join(name), seen),
        _ if line == "#pragma once" => String::new(),
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}
