//! The reference implementation of the hybrid: softmax over the last tokens and gated random feature attention over all
//! older ones, with a joint normalizer. It computes every token from the whole text and carries no sums.

use crate::mixers::rfa::naive::{Float, dot, gaussian_features};

/// The inputs of one head for one token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token<F> {
    /// (d)
    pub q: Vec<F>,
    /// (d)
    pub k: Vec<F>,
    /// (d)
    pub v: Vec<F>,
    /// The gate logit; `None` without a gate, in which case g and 1-g are both 1.
    pub gate: Option<F>,
}

/// A head's constants.
#[derive(Clone, Debug, PartialEq)]
pub struct Head<F> {
    /// Random vectors times sigma: (D, d)
    pub w: Vec<F>,
    /// Number of tokens that softmax attends to, including the newest (W); at least 1.
    pub window: usize,
    /// The log weight of the older tokens in the normalizer (b).
    pub far_bias: F,
    /// The lower bound of the far denominator, as a share of c.
    pub eps: f64,
}

/// Returns the weights of the older tokens, oldest first: `(1 - g_i) g_{i+1} ... g_n`. Their sum is c.
fn decays<F: Float>(older: &[Token<F>]) -> Vec<F> {
    let (zero, one) = (F::of(0.0), F::of(1.0));
    let sigmoid = |a: F| one / (one + (zero - a).exp());
    let keep = |token: &Token<F>| token.gate.map_or(one, sigmoid);
    let take = |token: &Token<F>| token.gate.map_or(one, |a| sigmoid(zero - a));
    let since = |i: usize| older[i + 1..].iter().fold(one, |product, token| product * keep(token));
    older.iter().enumerate().map(|(i, token)| take(token) * since(i)).collect()
}

/// Computes the output of a head at the newest token. Each token counts once: by softmax if it is one of the last W, by
/// its features if it is older:
/// `mu = max(max_j s_j, b)`,
/// `h = (sum_j e^{s_j - mu} v_j + e^{b - mu} phi_q S) / (sum_j e^{s_j - mu} + e^{b - mu} max(phi_q . z, eps c))`, with
/// `s_j = q . k_j / sqrt(d)`. While c is 0, b and the terms with S and z are left out.
///
/// tokens: the whole text so far, at least one token -> (d)
///
/// # Panics
/// When there are no tokens.
pub fn last<F: Float>(head: &Head<F>, tokens: &[Token<F>]) -> Vec<F> {
    let zero = F::of(0.0);
    let (older, near) = tokens.split_at(tokens.len().saturating_sub(head.window));
    let newest = &near[near.len() - 1];
    let d = newest.q.len();

    let decays = decays(older);
    let c = decays.iter().fold(zero, |sum, &weight| sum + weight);
    let phi_q = gaussian_features(&newest.q, &head.w);
    let kernel = |token: &Token<F>| dot(&phi_q, &gaussian_features(&token.k, &head.w));
    let far: Vec<F> = older.iter().zip(decays).map(|(token, weight)| weight * kernel(token)).collect();
    let (den, floor) = (far.iter().fold(zero, |sum, &weight| sum + weight), F::of(head.eps) * c);
    let den = if den > floor { den } else { floor };

    let scale = F::of(d as f64).sqrt();
    let scores: Vec<F> = near.iter().map(|token| dot(&newest.q, &token.k) / scale).collect();
    let larger = |most: F, score: F| if score > most { score } else { most };
    let mu = scores.iter().fold(scores[0], |most, &score| larger(most, score));
    let mu = if c > zero { larger(mu, head.far_bias) } else { mu };
    let share = if c > zero { (head.far_bias - mu).exp() } else { zero };

    let weights: Vec<F> = scores.iter().map(|&score| (score - mu).exp()).collect();
    let all = weights.iter().fold(share * den, |sum, &weight| sum + weight);
    let column = |i: usize| {
        let near = near.iter().zip(&weights).fold(zero, |sum, (token, &weight)| sum + weight * token.v[i]);
        let far = older.iter().zip(&far).fold(zero, |sum, (token, &weight)| sum + weight * token.v[i]);
        (near + share * far) / all
    };
    (0..d).map(column).collect()
}
