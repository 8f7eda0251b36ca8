//! The two text formats for scrapers: OpenMetrics, and the older Prometheus format.

/// Content type of OpenMetrics.
pub(crate) const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Content type of the older format.
pub(crate) const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Converts OpenMetrics to the older format, in which a family is named like its samples (a counter's name ends in
/// `_total`, an info's in `_info`) and there are no unit or end lines.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_names_families_like_their_samples() {
        let open = "# HELP a_bytes What.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\na_bytes_total{x=\"# TYPE\"} 1\n\
            # HELP b Of.\n# TYPE b info\nb_info{v=\"1\"} 1\n# HELP c Now.\n# TYPE c gauge\nc 2\n# EOF\n";
        let want = "# HELP a_bytes_total What.\n# TYPE a_bytes_total counter\na_bytes_total{x=\"# TYPE\"} 1\n\
            # HELP b_info Of.\n# TYPE b_info gauge\nb_info{v=\"1\"} 1\n# HELP c Now.\n# TYPE c gauge\nc 2\n";
        assert_eq!(classic(open), want);
    }
}
