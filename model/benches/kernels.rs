//! The kernels alone: products of one and many rows with each type of weights, and one token of the recurrence.
//!
//! `cargo bench -p tidegate-model --bench kernels`: times, and bytes a second of weights or states.

#![allow(missing_docs, reason = "criterion's macros write functions")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tidegate_model::measure::{Heads, Product};
use tidegate_model::{StateType, WeightType};

/// The feed-forward part of a layer of 768.
const SHAPE: (usize, usize) = (4096, 768);

fn products(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("product 4096x768");
    for kind in WeightType::ALL {
        for rows in [1, 8, 32, 512] {
            let mut product = Product::new(kind, SHAPE, rows, 1).unwrap_or_else(|error| panic!("{kind}: {error}"));
            group.throughput(Throughput::Bytes(product.bytes() as u64));
            group.bench_function(format!("{kind}, {rows} rows"), |bencher| bencher.iter(|| product.run()));
        }
    }
}

fn recurrence(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("recurrence D=d=64");
    for state in [StateType::F32, StateType::Bf16] {
        // In the nearest cache, in the next, and in memory.
        for heads in [1, 12, 4096] {
            let mut all = Heads::new(heads, state);
            group.throughput(Throughput::Bytes(all.bytes() as u64));
            group.bench_function(format!("{state:?}, {heads} heads"), |bencher| bencher.iter(|| all.run()));
        }
    }
}

criterion_group!(benches, products, recurrence);
criterion_main!(benches);
