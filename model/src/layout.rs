//! The layout of a conversation's state outside of a pool.

/// The order of the elements of one slot's exported state, a single slice: the memories of all layers, then the
/// convolution inputs of all layers, then, for an encoder-decoder, what cross attention keeps of the source, and the
/// number of source tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of heads per layer.
    pub heads: usize,
    /// Memory elements per head. Random features: S (F, d) row by row, z (F), c, and for FAVOR+ the maximum of its keys
    /// (the logarithm of their largest feature, which S and z are relative to; 0 for an empty text). Softmax: the keys
    /// (window, d), then the values; the token at position p is in row p mod window. Hybrid: the sums, then the cache,
    /// then, with a gate, the logits of the window's tokens, in the order of the keys. RWKV-7: S (d, d), one row per
    /// key element. Mamba-2: S (N, d), one row per element of B.
    pub head: usize,
    /// Past inputs that a layer keeps for its convolutions: kernel - 1, oldest first. RWKV-7: the last input of the
    /// time mix and that of the channel mix. 0 for layers without either.
    pub taps: usize,
    /// Channels of each input. Convolutions: 3 heads d; Mamba-2: those of x, B and C; RWKV-7: `hidden_size`; 0 for
    /// layers without either.
    pub channels: usize,
    /// Elements per head that cross attention keeps of the source: S (F, d) row by row, z (F) and c; for softmax the
    /// keys (maximum number of source tokens, d), then the values. 0 for a decoder-only model.
    pub cross: usize,
}

impl StateLayout {
    /// The index in [`Self::parts`] of what cross attention keeps.
    pub(crate) const SOURCE: usize = 2;

    /// Elements of one layer in each part: memory, convolution inputs, source.
    pub(crate) fn parts(&self) -> [usize; 3] {
        [self.heads * self.head, self.taps * self.channels, self.heads * self.cross]
    }

    /// Iterates over every part of every layer of an exported state: (part, layer, elements).
    pub(crate) fn split<'a>(
        &self,
        mut numbers: &'a [f32],
    ) -> impl Iterator<Item = (usize, usize, &'a [f32])> + use<'a> {
        let (parts, layers) = (self.parts(), self.layers);
        (0..parts.len() * layers).map(move |i| {
            let (own, rest) = numbers.split_at(parts[i / layers]);
            numbers = rest;
            (i / layers, i % layers, own)
        })
    }

    /// Elements of the memories: (layers, heads, head).
    pub fn memory(&self) -> usize {
        self.layers * self.heads * self.head
    }

    /// Elements of the convolution inputs: (layers, taps, channels).
    pub fn conv(&self) -> usize {
        self.layers * self.taps * self.channels
    }

    /// Elements of the source: (layers, heads, cross), plus the number of source tokens; 0 for a decoder-only model.
    pub fn source(&self) -> usize {
        if self.cross > 0 { self.layers * self.heads * self.cross + 1 } else { 0 }
    }

    /// Elements of a slot's state.
    pub fn numbers(&self) -> usize {
        self.memory() + self.conv() + self.source()
    }
}
