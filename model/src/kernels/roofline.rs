//! Measures the machine's limits: bytes per second read from memory, and operations per second in registers. The loops
//! do nothing else, so that a kernel's speed can be given as a share of these limits.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Instant;

use super::lines::Lines;
use super::prefetch::{LINE, prefetch};
use super::threads::Threads;
use super::{Isa, multiversion};

/// Bytes to read: far more than caches hold.
const BUFFER: usize = 512 << 20;
/// Bytes that a thread reads in one go: enough for the hardware prefetcher to be at its best.
const STRETCH: usize = 2 << 20;
/// Passes over the buffer per access pattern; the best counts.
const PASSES: usize = 4;
/// The access patterns with which a thread reads a stretch: places at once, and how many bytes ahead it prefetches. On
/// an Intel Xeon, a plain loop reads a fifth less than the best of them.
const WAYS: [(usize, usize); 5] = [(1, 0), (1, 1024), (2, 1024), (2, 3072), (4, 1024)];

/// Steps of each chain in a piece of work: about half a millisecond.
const STEPS: usize = 1 << 17;
/// Pieces per thread, so that none waits long for another's last.
const PIECES: usize = 8;
/// Repetitions; the best counts.
const TRIES: usize = 16;
/// The lanes of twelve registers that are sixteen, eight or four lanes wide. Two units with a latency of four cycles
/// need at least eight chains, and sixteen registers hold no more than twelve besides the factors. (On NEON, which has
/// 32 registers and up to four units, [`WIDE`] takes 24 registers.)
#[cfg(target_arch = "x86_64")]
const WIDEST: usize = 12 * 16;
const WIDE: usize = 12 * 8;
#[cfg(all(target_arch = "x86_64", not(target_feature = "fma")))]
const NARROW: usize = 12 * 4;

/// Returns how many bytes per second these threads together read from memory at best.
///
/// Allocates 512 MiB during the call.
pub fn read_bandwidth(threads: &Threads) -> f64 {
    let isa = Isa::detect();
    let mut buffer = Lines::zeroed(BUFFER);
    // Pages that were never written may all map to one page of zeros, which the cache holds.
    buffer.as_mut_slice::<f32>().fill(1.0);
    let stretches: Vec<&[f32]> = buffer.as_slice().chunks(STRETCH / size_of::<f32>()).collect();
    let seen = AtomicU32::new(0);
    let pass = |(places, ahead)| {
        best_of(PASSES, threads.count(), stretches.len(), &|i| {
            let mut total = 0;
            sum(isa, stretches[i], places, ahead, &mut total);
            seen.fetch_add(total, Ordering::Relaxed);
        })
    };
    let seconds = WAYS.into_iter().map(pass).fold(f64::INFINITY, f64::min);
    // Keeps the compiler from removing the sum.
    black_box(seen);
    BUFFER as f64 / seconds
}

/// Returns how many operations per second these threads together reach at best with fused multiply-adds (two operations
/// each) on f32 in registers. An x86 machine without AVX2 has no fused ones and is measured with separate operations.
pub fn fma_peak(threads: &Threads) -> f64 {
    let (isa, pieces) = (Isa::detect(), threads.count() * PIECES);
    let lanes = AtomicU32::new(0);
    let seconds = best_of(TRIES, threads.count(), pieces, &|_| {
        // The compiler knows neither the inputs nor that the result is unused, so it removes nothing.
        lanes.store(black_box(chains(isa, black_box(0.5), black_box(1e-6))).0, Ordering::Relaxed);
    });
    2.0 * f64::from(lanes.into_inner()) * (pieces * STEPS) as f64 / seconds
}

/// Returns the seconds that the pieces take in the best repetition, on new threads: [`Threads::run`] suspends workers
/// that were late, and here all must work.
fn best_of(times: usize, threads: usize, pieces: usize, work: &(dyn Fn(usize) + Sync)) -> f64 {
    let (gate, next) = (Barrier::new(threads), AtomicUsize::new(0));
    let share = || {
        gate.wait();
        while let Some(piece) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&piece| piece < pieces) {
            work(piece);
        }
        gate.wait();
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| (0..times).for_each(|_| share()));
        }
        let time = |_| {
            // The others are at the gate or about to reach it.
            next.store(0, Ordering::Relaxed);
            let clock = Instant::now();
            share();
            clock.elapsed().as_secs_f64()
        };
        (0..times).map(time).fold(f64::INFINITY, f64::min)
    })
}

/// Runs one piece on the instruction set's registers and returns the number of lanes and the sum of their results.
fn chains(isa: Isa, a: f32, b: f32) -> (u32, f32) {
    let mut end = 0.0;
    let lanes = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni => {
            widest(isa, a, b, &mut end);
            WIDEST
        }
        #[cfg(all(target_arch = "x86_64", not(target_feature = "fma")))]
        Isa::Plain => {
            separate::<NARROW>(a, b, &mut end);
            NARROW
        }
        #[cfg(not(all(target_arch = "x86_64", not(target_feature = "fma"))))]
        Isa::Plain => {
            wide(isa, a, b, &mut end);
            WIDE
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            wide(isa, a, b, &mut end);
            WIDE
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::NeonDot => {
            wide(isa, a, b, &mut end);
            WIDE
        }
    };
    (lanes as u32, end)
}

multiversion! {
    /// Sums the numbers' bit patterns, reading one, two or four places at once. ahead: how many bytes ahead to prefetch
    fn sum(numbers: &[f32], places: usize, ahead: usize, total: &mut u32) = sum_body;
}

#[cfg(target_arch = "x86_64")]
multiversion! { fn widest(a: f32, b: f32, end: &mut f32) = fused::<WIDEST>; }
multiversion! { fn wide(a: f32, b: f32, end: &mut f32) = fused::<WIDE>; }

#[inline(always)]
fn sum_body(numbers: &[f32], places: usize, ahead: usize, total: &mut u32) {
    *total = match places {
        1 => runs::<1>(numbers, ahead),
        2 => runs::<2>(numbers, ahead),
        _ => runs::<4>(numbers, ahead),
    };
}

/// Sums `P` parts of the numbers, a run of each in turn. Integers may be added in any order, so the compiler vectorizes
/// a run at every optimization level.
#[inline(always)]
fn runs<const P: usize>(numbers: &[f32], ahead: usize) -> u32 {
    const RUN: usize = 16 * LINE / size_of::<f32>();
    let add = |sum: u32, numbers: &[f32]| numbers.iter().fold(sum, |sum, number| sum.wrapping_add(number.to_bits()));
    let (all, rest) = numbers.as_chunks::<RUN>();
    let (part, mut sum) = (all.len() / P, 0);
    for i in 0..part {
        for p in 0..P {
            let run = &all[p * part + i];
            if ahead > 0 {
                for line in (0..size_of_val(run)).step_by(LINE) {
                    prefetch(run.as_ptr().wrapping_byte_add(ahead + line));
                }
            }
            sum = add(sum, run);
        }
    }
    add(add(sum, all[P * part..].as_flattened()), rest)
}

/// Computes `chain = a b + chain` in every lane, over and over.
#[inline(always)]
fn fused<const N: usize>(a: f32, b: f32, end: &mut f32) {
    let mut chains = [1.0f32; N];
    for _ in 0..STEPS {
        for chain in &mut chains {
            *chain = a.mul_add(b, *chain);
        }
    }
    *end = chains.iter().sum();
}

/// Computes `chain = chain a + b`: the compiler would move the product of [`fused`] out of the loop.
#[cfg(all(target_arch = "x86_64", not(target_feature = "fma")))]
fn separate<const N: usize>(a: f32, b: f32, end: &mut f32) {
    let mut chains = [1.0f32; N];
    for _ in 0..STEPS {
        for chain in &mut chains {
            *chain = *chain * a + b;
        }
    }
    *end = chains.iter().sum();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_are_read() {
        // All are finite, and 1001 is not a multiple of any number of lanes.
        let numbers: Vec<f32> = (1..=1001).map(f32::from_bits).collect();
        for isa in Isa::available() {
            for (places, ahead) in WAYS {
                let mut total = 0;
                sum(isa, &numbers, places, ahead, &mut total);
                assert_eq!(total, 1001 * 1002 / 2, "{isa:?}, {places} places");
            }
        }
    }

    #[test]
    fn every_chain_takes_every_step() {
        for isa in Isa::available() {
            let step = 1.0 / STEPS as f32;
            let (lanes, end) = chains(isa, 0.5, 2.0 * step);
            #[cfg(target_arch = "x86_64")]
            if matches!(isa, Isa::Avx512 | Isa::Avx512Vnni) {
                assert_eq!(lanes as usize, WIDEST, "{isa:?}: too few chains for the registers");
            }
            // Fused, each lane ends at 1 + STEPS a b, to the bit; separate, at its limit b / (1 - a).
            let want = if (lanes as usize) < WIDE { 4.0 * step } else { 2.0 };
            assert!((end / lanes as f32 - want).abs() < 1e-6, "{isa:?}: {end} of {lanes} lanes");
        }
    }

    #[test]
    fn every_piece_is_done_every_time() {
        for threads in [1, 3] {
            let hits: Vec<AtomicUsize> = (0..50).map(|_| AtomicUsize::new(0)).collect();
            best_of(4, threads, hits.len(), &|i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(hits.iter().all(|hits| hits.load(Ordering::Relaxed) == 4), "{threads} threads");
        }
    }

    #[test]
    fn the_measured_limits_are_plausible() {
        for count in [1, 2] {
            let threads = Threads::new(count);
            let (bandwidth, peak) = (read_bandwidth(&threads), fma_peak(&threads));
            println!("{count}: {:.1} GB/s, {:.1} GFLOP/s", bandwidth / 1e9, peak / 1e9);
            assert!((1e8..1e13).contains(&bandwidth) && (1e8..1e14).contains(&peak), "{bandwidth} B/s, {peak} FLOP/s");
        }
    }
}
