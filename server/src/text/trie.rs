//! A trie over the bytes of a vocabulary's tokens, which finds the longest token at the beginning of a text.

/// The nodes in order of depth. A node's children are adjacent, ordered by their bytes.
pub(super) struct Trie {
    nodes: Vec<Node>,
    /// The byte that leads to each node.
    labels: Vec<u8>,
}

struct Node {
    /// The token that ends here.
    token: Option<u32>,
    /// The first child.
    first: usize,
    /// The node after the last child.
    end: usize,
}

impl Trie {
    /// Builds the trie of tokens that are ordered by their bytes. No two may have the same bytes.
    pub(super) fn new(sorted: &[(&[u8], u32)]) -> Self {
        let (mut nodes, mut labels) = (Vec::new(), vec![0]);
        // For each node, the tokens that begin with its bytes, and the number of these bytes.
        let mut below = vec![(sorted, 0)];
        while let Some(&(tokens, depth)) = below.get(nodes.len()) {
            // A token that ends at this node is the first.
            let (token, longer) = match tokens.split_first() {
                Some(((bytes, id), longer)) if bytes.len() == depth => (Some(*id), longer),
                _ => (None, tokens),
            };
            let first = below.len();
            for group in longer.chunk_by(|a, b| a.0[depth] == b.0[depth]) {
                below.push((group, depth + 1));
                labels.push(group[0].0[depth]);
            }
            nodes.push(Node { token, first, end: below.len() });
        }
        Self { nodes, labels }
    }

    /// Returns the length and the id of the longest token at the beginning of `text`; `None` if there is none.
    pub(super) fn longest(&self, text: &[u8]) -> Option<(usize, u32)> {
        let (mut node, mut longest) = (&self.nodes[0], None);
        for (at, byte) in text.iter().enumerate() {
            let Ok(child) = self.labels[node.first..node.end].binary_search(byte) else { break };
            node = &self.nodes[node.first + child];
            longest = node.token.map(|id| (at + 1, id)).or(longest);
        }
        longest
    }
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
