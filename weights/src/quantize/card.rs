//! The section that quantization adds to a checkpoint's model card.

use super::report::{Comparison, QuantizeReport};
use crate::terminal::grouped;

/// Returns the card with the new section. old: the original card, or empty; model, out: the folders' names
pub(super) fn with_section(old: &str, model: &str, out: &str, report: &QuantizeReport) -> String {
    let (old, original) = match old.trim_end() {
        "" => (format!("# {out}"), ""),
        old => (old.to_owned(), " Types, sizes and losses above are those of the original."),
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

with version {version}. The matrices are {to}{fallback}.
All other tensors (norms, gates, sigma, random matrices) keep their type. The tensors' size went from {before} to {after}
bytes.{original}

| matrices | stored as | relative error (root mean square) |
| --- | --- | --- |
{matrices}
{losses}",
        fallback =
            if report.in_f16().next().is_some() { ", or f16 if their rows are not a multiple of its block" } else { "" },
        before = grouped(before),
        after = grouped(after),
        matrices = matrices.join("\n"),
        losses = report.on_text.as_ref().map_or_else(String::new, losses),
    )
}

fn losses(seen: &Comparison) -> String {
    let Comparison { text, before, after, .. } = seen;
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
