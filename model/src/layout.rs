//! The layout of a conversation's state outside of a pool.

/// The order of the numbers of one slot, as one slice: the memories of all layers, then the inputs of all convolutions,
/// then for an encoder-decoder what its cross attention keeps of the source and the number of the source's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Layers of the decoder.
    pub layers: usize,
    /// Heads of a layer.
    pub heads: usize,
    /// Numbers that a head remembers. Random features: S (F, d) row by row, z (F), c, and for FAVOR+ the maximum of its keys
    /// (the logarithm of their largest feature, which S and z are relative to; 0 for an empty text). Softmax: the keys
    /// (window, d), then the values; the token at position p is in row p mod window. Hybrid: the sums, then the cache, then
    /// with a gate the logits of the window's tokens, in the order of the keys. RWKV-7: S (d, d), a row for each number of
    /// a key. Mamba-2: S (N, d), a row for each number of B.
    pub head: usize,
    /// Inputs that a layer remembers for its convolutions: kernel - 1, oldest first; in RWKV-7 the last input of the time
    /// mix and that of the channel mix; 0 without either.
    pub taps: usize,
    /// Channels of each input: of convolutions 3 heads d, in Mamba-2 those of x, B and C; in RWKV-7 `hidden_size`;
    /// 0 without either.
    pub channels: usize,
    /// Numbers that a head of cross attention keeps of the source: S (F, d) row by row, z (F) and c; for softmax the keys
    /// (maximum number of source tokens, d), then the values. 0 for a decoder alone.
    pub cross: usize,
}

impl StateLayout {
    /// The part of [`Self::parts`] that cross attention keeps.
    pub(crate) const SOURCE: usize = 2;

    /// Numbers of one layer in each part: memory, inputs of convolutions, source.
    pub(crate) fn parts(&self) -> [usize; 3] {
        [self.heads * self.head, self.taps * self.channels, self.heads * self.cross]
    }

    /// Every part of every layer of an exported state: (part, layer, numbers).
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

    /// Numbers of the memories: (layers, heads, head).
    pub fn memory(&self) -> usize {
        self.layers * self.heads * self.head
    }

    /// Numbers of the convolutions' inputs: (layers, taps, channels).
    pub fn conv(&self) -> usize {
        self.layers * self.taps * self.channels
    }

    /// Numbers of the source: (layers, heads, cross), then its number of tokens; 0 for a decoder alone.
    pub fn source(&self) -> usize {
        if self.cross > 0 { self.layers * self.heads * self.cross + 1 } else { 0 }
    }

    /// Numbers of a slot.
    pub fn numbers(&self) -> usize {
        self.memory() + self.conv() + self.source()
    }
}
