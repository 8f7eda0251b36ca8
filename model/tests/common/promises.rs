//! What every decoder promises, whatever mixes its tokens: cut anywhere, batched with anyone, on any threads, moved to any
//! slot, a text has the same bits.

use tidegate_model::{Decoder, PoolOptions, StatePool, StateType, Threads};

use super::{Numbers, bits, flat, row};

/// All state of a slot.
pub fn state(pool: &StatePool, slot: usize) -> Vec<u32> {
    bits(&pool.export(slot).unwrap())
}

pub fn pool(decoder: &Decoder, slots: usize, state: StateType) -> StatePool {
    decoder.new_pool_with(PoolOptions { state, ..PoolOptions::new(slots) }).unwrap()
}

/// A text read at once, token by token, or cut at any of these places.
pub fn cut_anywhere(decoder: &Decoder, state_type: StateType, tokens: usize, cuts: &[usize], name: &str) {
    let vocab = decoder.config().vocab_size;
    let ids = Numbers::new(4).ids(tokens, vocab);
    let mut pool = pool(decoder, 3, state_type);
    let whole = flat(&decoder.forward(&row(&ids), &mut pool, &[0]).unwrap());
    let steps: Vec<f32> = ids.iter().flat_map(|&id| decoder.decode(&[id], &mut pool, &[1]).unwrap()).collect();
    assert!(whole.iter().any(|v| v.abs() > 0.1), "logits without contrast");
    assert_eq!(bits(&whole), bits(&steps), "{name}");
    assert_eq!(state(&pool, 0), state(&pool, 1), "{name}");
    for &cut in cuts {
        pool.reset(2).unwrap();
        decoder.absorb(&ids[..cut], &mut pool, 2).unwrap();
        let last = decoder.prefill(&ids[cut..], &mut pool, 2).unwrap();
        assert_eq!(bits(&last), bits(&whole[whole.len() - vocab..]), "{name}, cut at {cut}");
        assert_eq!(state(&pool, 2), state(&pool, 0), "{name}, cut at {cut}");
        assert_eq!(pool.tokens(2), tokens as u64);
    }
}

/// A state that goes on in another pool, after each of these numbers of tokens, in slots that others had.
pub fn moved_anywhere(decoder: &Decoder, state_type: StateType, tokens: usize, reads: &[usize], name: &str) {
    let ids = Numbers::new(18).ids(tokens, decoder.config().vocab_size);
    let (mut here, mut there) = (pool(decoder, 2, state_type), pool(decoder, 3, state_type));
    for &read in reads {
        here.reset(1).unwrap();
        decoder.absorb(&ids[..read], &mut here, 1).unwrap();
        let numbers = here.export(1).unwrap();
        assert_eq!(numbers.len(), here.layout().numbers());
        assert_eq!(numbers.len() * 4, decoder.config().state_bytes());
        decoder.absorb(&ids[..read + 29], &mut there, 2).unwrap();
        there.import(2, &numbers, read as u64).unwrap();
        assert_eq!(bits(&numbers), state(&there, 2), "{name}");
        let stayed = decoder.prefill(&ids[read..], &mut here, 1).unwrap();
        let moved = decoder.prefill(&ids[read..], &mut there, 2).unwrap();
        assert_eq!(bits(&stayed), bits(&moved), "{name}: {read} tokens");
    }
    here.reset(1).unwrap();
    assert!(here.export(1).unwrap().iter().all(|&v| v == 0.0));
    let fresh = decoder.prefill(&ids, &mut here, 0).unwrap();
    assert_eq!(bits(&decoder.prefill(&ids, &mut here, 1).unwrap()), bits(&fresh), "{name}");
}

/// Texts of different lengths, then twenty steps together, in scattered slots; and each of them alone.
pub fn alone_or_together(decoder: &Decoder, lengths: [usize; 5], name: &str) {
    let (mut numbers, vocab) = (Numbers::new(8), decoder.config().vocab_size);
    let prompts = lengths.map(|len| numbers.ids(len, vocab));
    let steps: Vec<Vec<u32>> = (0..20).map(|_| numbers.ids(prompts.len(), vocab)).collect();
    let slots = [6, 0, 3, 7, 2];
    let mut pool = decoder.new_pool(8).unwrap();
    for (prompt, &slot) in prompts.iter().zip(&slots) {
        decoder.prefill(prompt, &mut pool, slot).unwrap();
    }
    let together: Vec<Vec<f32>> = steps.iter().map(|ids| decoder.decode(ids, &mut pool, &slots).unwrap()).collect();
    for (i, prompt) in prompts.iter().enumerate() {
        let mut alone = decoder.new_pool(1).unwrap();
        decoder.prefill(prompt, &mut alone, 0).unwrap();
        for (ids, together) in steps.iter().zip(&together) {
            let logits = decoder.decode(&ids[i..=i], &mut alone, &[0]).unwrap();
            assert_eq!(bits(&logits), bits(&together[i * vocab..][..vocab]), "{name}: row {i}");
        }
        assert_eq!(state(&alone, 0), state(&pool, slots[i]), "{name}: row {i}");
    }
}

/// A long text and its beginning, then steps of both, on one thread and on several.
pub fn threads_change_no_bit(decoder: &Decoder, state_type: StateType, (tokens, begun): (usize, usize), steps: usize) {
    let ids = Numbers::new(21).ids(tokens, decoder.config().vocab_size);
    let run = |threads: usize| {
        let options = PoolOptions { threads: Threads::new(threads).into(), state: state_type, ..PoolOptions::new(3) };
        let mut pool = decoder.new_pool_with(options).unwrap();
        decoder.absorb(&ids[..begun], &mut pool, 0).unwrap();
        decoder.absorb(&ids, &mut pool, 2).unwrap();
        let steps = (0..steps).flat_map(|i| decoder.decode(&ids[i..i + 2], &mut pool, &[2, 0]).unwrap());
        (bits(&steps.collect::<Vec<f32>>()), state(&pool, 0), state(&pool, 2))
    };
    let alone = run(1);
    assert!([2, 3].into_iter().all(|threads| run(threads) == alone));
}
