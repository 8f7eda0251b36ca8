//! The two text formats for scrapers: OpenMetrics, and the older Prometheus format.

/// Content type of OpenMetrics.
pub(crate) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Content type of the older format.
pub(crate) const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Converts OpenMetrics to the older format, in which a family has the same name as its samples (`_total` at the end
/// for a counter, `_info` for an info metric) and there are no unit or end lines.
pub(super) fn classic(open: &str) -> String {
    let mut text = String::with_capacity(open.len());
    let mut help = None;
    for line in open.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ').map(|(_, help)| help);
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                kind => ("", kind),
            };
            if let Some(help) = help.take() {
                text.extend(["# HELP ", name, suffix, " ", help, "\n"]);
            }
            text.extend(["# TYPE ", name, suffix, " ", kind, "\n"]);
        } else if !line.starts_with('#') {
            text.extend([line, "\n"]);
        }
    }
    text
}

/// Merges the texts of registries with the same families, so that each family is contiguous, as the formats require.
pub(super) fn merged(texts: &[String]) -> String {
    let mut families: Vec<(&str, String)> = Vec::new();
    for text in texts {
        let (mut at, mut is_new) = (0, false);
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("# HELP ").and_then(|rest| rest.split(' ').next()) {
                let known = families.iter().position(|(family, _)| *family == name);
                is_new = known.is_none();
                at = known.unwrap_or(families.len());
                if is_new {
                    families.push((name, String::new()));
                }
            }
            if let Some((_, lines)) = families.get_mut(at).filter(|_| is_new || !line.starts_with('#')) {
                lines.extend([line, "\n"]);
            }
        }
    }
    families.into_iter().map(|(_, lines)| lines).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_families_of_several_registries_are_together() {
        let of = |model: &str, more: &str| {
            format!(
                "# HELP a What.\n# TYPE a gauge\na{{model=\"{model}\"}} 1\n{more}# HELP c Now.\n# TYPE c gauge\nc{{model=\"{model}\"}} 2\n"
            )
        };
        let texts = [of("x", ""), of("y", "# HELP b Of.\n# TYPE b info\nb_info 1\n")];
        let want = "# HELP a What.\n# TYPE a gauge\na{model=\"x\"} 1\na{model=\"y\"} 1\n# HELP c Now.\n# TYPE c gauge\n\
            c{model=\"x\"} 2\nc{model=\"y\"} 2\n# HELP b Of.\n# TYPE b info\nb_info 1\n";
        assert_eq!(merged(&texts), want);
        assert_eq!(merged(&[]), "");
    }

    #[test]
    fn the_older_format_names_families_like_their_samples() {
        let open = "# HELP a_bytes What.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{x=\"# TYPE\"} 1\n\
            # HELP b Of.\n# TYPE b info\nb_info{v=\"1\"} 1\n# HELP c Now.\n# TYPE c gauge\nc 2\n# EOF\n";
        let want = "# HELP a_bytes_total What.\n# TYPE a_bytes_total counter\na_bytes_total{x=\"# TYPE\"} 1\n\
            # HELP b_info Of.\n# TYPE b_info gauge\nb_info{v=\"1\"} 1\n# HELP c Now.\n# TYPE c gauge\nc 2\n";
        assert_eq!(classic(open), want);
    }
}
