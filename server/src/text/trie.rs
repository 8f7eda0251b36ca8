//! A trie over the bytes of a vocabulary's tokens, which finds the longest token at the beginning of a text.

/// The nodes in order of depth. A node's children are adjacent, ordered by their bytes, and follow those of the node
/// before it.
pub(super) struct Trie {
    /// The nodes, and one more, whose first child would follow all nodes.
    nodes: Box<[Node]>,
    /// The byte that leads to each node.
    labels: Box<[u8]>,
}

/// Nodes are small because a vocabulary of 65,536 tokens has several times as many.
struct Node {
    /// The token that ends here, or [`NONE`].
    token: u32,
    /// The index of the first child.
    first: u32,
}

/// No token has this id: ids are below the size of a vocabulary.
const NONE: u32 = u32::MAX;

impl Trie {
    /// Builds the trie of tokens that are ordered by their bytes. No two may have the same bytes.
    pub(super) fn new(sorted: &[(&[u8], u32)]) -> Self {
        let (mut nodes, mut labels) = (Vec::new(), vec![0]);
        // For each node, the tokens that begin with its bytes, and the number of these bytes.
        let mut below = vec![(sorted, 0)];
        while let Some(&(tokens, depth)) = below.get(nodes.len()) {
            // A token that ends at this node is the first.
            let (token, longer) = match tokens.split_first() {
                Some(((bytes, id), longer)) if bytes.len() == depth => (*id, longer),
                _ => (NONE, tokens),
            };
            nodes.push(Node { token, first: index(below.len()) });
            for group in longer.chunk_by(|a, b| a.0[depth] == b.0[depth]) {
                below.push((group, depth + 1));
                labels.push(group[0].0[depth]);
            }
        }
        nodes.push(Node { token: NONE, first: index(below.len()) });
        Self { nodes: nodes.into(), labels: labels.into() }
    }

    /// Returns the length and the id of the longest token at the beginning of `text`; `None` if there is none.
    pub(super) fn longest(&self, text: &[u8]) -> Option<(usize, u32)> {
        let (mut node, mut longest) = (0, None);
        for (at, byte) in text.iter().enumerate() {
            let [first, end] = [node, node + 1].map(|node| self.nodes[node].first as usize);
            let Ok(child) = self.labels[first..end].binary_search(byte) else { break };
            node = first + child;
            let token = self.nodes[node].token;
            if token != NONE {
                longest = Some((at + 1, token));
            }
        }
        longest
    }
}

/// The nodes of a vocabulary that fits in memory can be counted in 32 bits: building the trie takes dozens of bytes each.
fn index(nodes: usize) -> u32 {
    u32::try_from(nodes).expect("a trie has fewer than 4 billion nodes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_token_is_found_past_places_where_none_ends() {
        let trie = Trie::new(&[(b"a", 1), (b"abcd", 2), (b"b", 3), (b"bc", 4), (b"\xff\xfe", 5)]);
        for (text, longest) in [
            (b"abcde".as_slice(), Some((4, 2))),
            (b"abc", Some((1, 1))),
            (b"bcd", Some((2, 4))),
            (b"b", Some((1, 3))),
            (b"\xff\xfe\xff", Some((2, 5))),
            (b"\xff", None),
            (b"c", None),
            (b"", None),
        ] {
            assert_eq!(trie.longest(text), longest, "{text:?}");
        }
        assert_eq!(Trie::new(&[]).longest(b"a"), None);
    }
}
