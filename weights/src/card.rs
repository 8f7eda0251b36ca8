//! What a quantised checkpoint's model card says of the quantising.

use crate::quantize::{OnText, QuantizeReport};
use crate::terminal::grouped;

/// The card with a section more; `old` is the original's, or empty; `model` and `out` are the folders' names.
pub fn with_section(old: &str, model: &str, out: &str, report: &QuantizeReport) -> String {
    let (old, original) = match old.trim_end() {
        "" => (format!("# {out}"), ""),
        old => (old.to_owned(), " What is said above of types, sizes and losses is said of the original."),
    };
    let (version, to) = (env!("CARGO_PKG_VERSION"), report.to);
    let text = report.on_text.as_ref().map_or_else(String::new, |seen| {
        let limit = seen.limit.map_or_else(String::new, |limit| format!(" --limit {limit}"));
        format!(" --text {}{limit}", seen.text)
    });
    let (before, after) = report.groups.iter().fold((0, 0), |(b, a), group| (b + group.before, a + group.after));
    let matrices: Vec<_> = report
        .matrices
        .iter()
        .map(|m| format!("| {} | {} | {:.3} % |", m.name, m.stored_as, 100.0 * m.relative_error))
        .collect();
    format!(
        "{old}

## Quantised

The weights of this folder, `model.gguf`, were made from `{model}/model.safetensors` by

```sh
tidegate-weights quantize --model {model} --to {to} --out {out}{text}
```

of version {version}. The matrices are {to}{fallback}.
All other tensors (norms, gates, what the attention has of its own) are as they were. The tensors' {before} bytes became
{after}.{original}

| matrices | stored as | relative error (root mean square) |
| --- | --- | --- |
{matrices}
{losses}",
        fallback =
            if report.in_f16().next().is_some() { ", or f16 where their rows are not whole blocks of it" } else { "" },
        before = grouped(before),
        after = grouped(after),
        matrices = matrices.join("\n"),
        losses = report.on_text.as_ref().map_or_else(String::new, losses),
    )
}

fn losses(seen: &OnText) -> String {
    let OnText { text, before, after, .. } = seen;
    format!(
        "
| on {tokens} tokens of {text} | before | after | difference |
| --- | --- | --- | --- |
| perplexity | {:.4} | {:.4} | {:+.4} |
| bits per byte | {:.5} | {:.5} | {:+.5} |
",
        before.perplexity,
        after.perplexity,
        seen.perplexity_difference,
        before.bits_per_byte,
        after.bits_per_byte,
        seen.bits_per_byte_difference,
        tokens = grouped(before.tokens),
    )
}
