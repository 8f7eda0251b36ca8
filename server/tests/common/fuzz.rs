//! A small mutational fuzzer. Each run tries the same few hundred inputs, or new inputs for `TIDEGATE_FUZZ_SECONDS`
//! seconds if that variable is set.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Number of inputs that a run without a time limit tries.
const INPUTS: u64 = 300;
/// Maximum number of changes to one input.
const CHANGES: usize = 6;
/// Maximum length of an input in bytes.
const LONGEST: usize = 256 << 10;

/// An input to try.
pub(crate) struct Input {
    /// The seed of the random generator; the same number gives the same input.
    pub(crate) number: u64,
    /// The index of the seed input that was changed.
    pub(crate) seed: usize,
    pub(crate) bytes: Vec<u8>,
}

/// Returns the inputs to try. Each is one of `seeds` with a few random changes, which may insert `words`.
pub(crate) fn inputs(seeds: &[Vec<u8>], words: &[&str]) -> impl Iterator<Item = Input> {
    tried(|number| input(number, seeds, words))
}

/// Like [`inputs`], but in every other input only one or two bytes change. More changes rarely get past the first
/// checks of a format whose numbers depend on one another.
pub(crate) fn inputs_and_flips(seeds: &[Vec<u8>], words: &[&str]) -> impl Iterator<Item = Input> {
    tried(|number| if number % 2 == 0 { input(number, seeds, words) } else { flipped(number, seeds) })
}

fn tried(make: impl FnMut(u64) -> Input) -> impl Iterator<Item = Input> {
    let limit =
        std::env::var("TIDEGATE_FUZZ_SECONDS").ok().map(|seconds| seconds.parse().expect("a number of seconds"));
    let (clock, first) = (Instant::now(), if limit.is_some() { rand::rng().random::<u32>().into() } else { 0 });
    let mut tried = 0;
    (first..).map(make).take_while(move |_| {
        let goes_on = limit.map_or(tried < INPUTS, |seconds| clock.elapsed() < Duration::from_secs(seconds));
        tried += u64::from(goes_on);
        if !goes_on {
            println!("tried {tried} inputs");
        }
        goes_on
    })
}

fn flipped(number: u64, seeds: &[Vec<u8>]) -> Input {
    let mut rng = StdRng::seed_from_u64(number);
    let seed = rng.random_range(0..seeds.len());
    let mut bytes = seeds[seed].clone();
    for _ in 0..rng.random_range(1..=2) {
        let at = rng.random_range(0..bytes.len());
        bytes[at] = if rng.random() { bytes[at] ^ 1 << rng.random_range(0..8) } else { rng.random() };
    }
    Input { number, seed, bytes }
}

fn input(number: u64, seeds: &[Vec<u8>], words: &[&str]) -> Input {
    let mut rng = StdRng::seed_from_u64(number);
    let seed = rng.random_range(0..seeds.len());
    let mut bytes = seeds[seed].clone();
    for _ in 0..rng.random_range(1..=CHANGES) {
        let at = rng.random_range(0..=bytes.len());
        let end = rng.random_range(at..=bytes.len().min(at + 32));
        match rng.random_range(0..7) {
            0 if at < bytes.len() => bytes[at] ^= 1 << rng.random_range(0..8),
            1 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff, b'"', b'{', b'}'][rng.random_range(0..8)],
            2 => drop(bytes.drain(at..end)),
            3 => {
                let copy = bytes[at..end].repeat(rng.random_range(1..=8));
                bytes.splice(at..at, copy);
            }
            4 => bytes.truncate(at),
            5 => {
                let other = &seeds[rng.random_range(0..seeds.len())];
                let from = rng.random_range(0..=other.len());
                bytes.splice(at..end, other[from..other.len().min(from + 64)].iter().copied());
            }
            _ => {
                let word = if words.is_empty() { "" } else { words[rng.random_range(0..words.len())] };
                bytes.splice(at..end, word.bytes());
            }
        }
        bytes.truncate(LONGEST);
    }
    Input { number, seed, bytes }
}
