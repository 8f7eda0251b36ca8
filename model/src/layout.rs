//! What a conversation's state is made of: how its numbers lie outside of the pool, where no tensor says so.

/// How the numbers of one slot lie when they leave the pool as one slice: the memories of all layers, then the
/// inputs of all convolutions, then of an encoder-decoder what it keeps of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateLayout {
    /// Layers of the decoder.
    pub layers: usize,
    /// Heads of a layer.
    pub heads: usize,
    /// Numbers that a head remembers: S (F, d) row by row, z (F), c, and for favor the maximum of its keys (the logarithm
    /// of their greatest feature, which S and z are relative to; 0 of an empty text);
    /// for softmax attention the keys (window, d), then the values, the token at position p in row p mod window; for
    /// hybrid the sums, then the cache, then with a gate the logits of the window's tokens, in the rows of the keys.
    pub head: usize,
    /// Inputs that a layer's convolutions remember: kernel - 1, oldest first; 0 without convolutions.
    pub taps: usize,
    /// Channels of each of them: 3 heads d; 0 without convolutions.
    pub channels: usize,
    /// Numbers that a head of cross attention keeps of the source: S (F, d) row by row, z (F) and c; for softmax
    /// attention the keys (most source tokens, d), then the values. 0 for a decoder alone.
    pub cross: usize,
}

impl StateLayout {
    /// Numbers of the memories: (layers, heads, head).
    pub fn memory(&self) -> usize {
        self.layers * self.heads * self.head
    }

    /// Numbers of the convolutions' inputs: (layers, taps, channels).
    pub fn conv(&self) -> usize {
        self.layers * self.taps * self.channels
    }

    /// Numbers of the source: (layers, heads, cross), then how many tokens it has; none for a decoder alone.
    pub fn source(&self) -> usize {
        if self.cross > 0 { self.layers * self.heads * self.cross + 1 } else { 0 }
    }

    /// All numbers of a slot.
    pub fn numbers(&self) -> usize {
        self.memory() + self.conv() + self.source()
    }
}
