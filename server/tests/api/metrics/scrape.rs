//! A strict parser for both text formats that refuses whatever a scraper would refuse.

use std::collections::{BTreeMap, BTreeSet};

/// A parsed scrape.
pub(crate) struct Scrape {
    /// The type of each family, by name.
    pub(crate) families: BTreeMap<String, String>,
    /// The value of each sample, by its name and labels as written.
    pub(crate) samples: BTreeMap<String, f64>,
}

fn is_name(name: &str) -> bool {
    let mut characters = name.chars();
    characters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && characters.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Parses a sample: name, sorted labels, value.
fn sample(line: &str) -> (&str, Vec<(String, String)>, f64) {
    let end = line.find(['{', ' ']).unwrap_or_else(|| panic!("no value: {line}"));
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        while !rest.starts_with('}') {
            let (label, value) = rest.split_once("=\"").unwrap_or_else(|| panic!("no label: {line}"));
            assert!(is_name(label), "{label} names no label: {line}");
            let (mut text, mut characters) = (String::new(), value.char_indices());
            let end = loop {
                match characters.next().unwrap_or_else(|| panic!("no end of a label: {line}")) {
                    (at, '"') => break at,
                    (_, '\\') => match characters.next() {
                        Some((_, 'n')) => text.push('\n'),
                        Some((_, c @ ('"' | '\\'))) => text.push(c),
                        other => panic!("{other:?} escaped: {line}"),
                    },
                    (_, c) => text.push(c),
                }
            };
            labels.push((label.to_owned(), text));
            rest = &value[end + 1..];
            rest = rest.strip_prefix(',').unwrap_or(rest);
        }
        rest = &rest[1..];
    }
    let value = rest.strip_prefix(' ').unwrap_or_else(|| panic!("no space: {line}"));
    assert!(is_name(name) && !value.contains(' '), "{line}");
    let names: BTreeSet<&String> = labels.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), labels.len(), "duplicate label: {line}");
    (name, labels, value.parse().unwrap_or_else(|_| panic!("no number: {line}")))
}

/// Returns the suffixes of the samples of a metric type.
fn suffixes(kind: &str, open: bool) -> &'static [&'static str] {
    match (kind, open) {
        ("counter", true) => &["_total"],
        ("info", true) => &["_info"],
        ("counter" | "gauge", _) => &[""],
        ("histogram", _) => &["_bucket", "_count", "_sum"],
        _ => panic!("unexpected type {kind}"),
    }
}

/// Parses OpenMetrics if `open`, and otherwise the older text format.
pub(crate) fn read(text: &str, open: bool) -> Scrape {
    let body = if open { text.strip_suffix("# EOF\n").expect("no end") } else { text };
    assert!(body.ends_with('\n') && !body.contains("\n\n"), "no lines");
    let (mut families, mut samples) = (BTreeMap::new(), BTreeMap::new());
    let (mut helped, mut family) = (None::<String>, None::<(String, String)>);
    for line in body.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let parts: Vec<&str> = comment.splitn(3, ' ').collect();
            let [word, name, rest] = parts[..] else { panic!("unknown comment: {line}") };
            match word {
                "HELP" => {
                    assert!(!rest.is_empty() && helped.is_none(), "{line}");
                    helped = Some(name.to_owned());
                }
                "TYPE" => {
                    assert_eq!(helped.take().as_deref(), Some(name), "no HELP before it: {line}");
                    assert!(families.insert(name.to_owned(), rest.to_owned()).is_none(), "{name} comes twice");
                    assert!(!open || rest == "histogram" || rest == "gauge" || !name.ends_with("_total"), "{line}");
                    family = Some((name.to_owned(), rest.to_owned()));
                }
                "UNIT" => assert!(open && name.ends_with(&format!("_{rest}")), "{line}"),
                _ => panic!("{line}"),
            }
            continue;
        }
        let (name, labels, value) = sample(line);
        let (family, kind) = family.as_ref().expect("a family comes before its samples");
        let known = suffixes(kind, open).iter().any(|suffix| name.strip_suffix(suffix) == Some(family));
        assert!(known, "{name} is no sample of {family}, a {kind}");
        assert!(value.is_finite() && value >= 0.0, "{line}");
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let key = if labels.is_empty() { name.to_owned() } else { format!("{name}{{{}}}", labels.join(",")) };
        assert!(samples.insert(key, value).is_none(), "duplicate sample: {line}");
    }
    let scrape = Scrape { families, samples };
    let histograms = scrape.families.iter().filter(|(_, kind)| *kind == "histogram");
    histograms.for_each(|(name, _)| scrape.check_histogram(name, body));
    scrape
}

impl Scrape {
    /// Checks the histogram of each set of labels other than `le`, which comes first: in `text` the buckets are in
    /// ascending order, and the last one holds the total count.
    fn check_histogram(&self, name: &str, text: &str) {
        let mut all: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for line in text.lines().filter_map(|line| line.strip_prefix(&format!("{name}_bucket{{le=\""))) {
            let (labels, count) = line.rsplit_once("} ").unwrap();
            let (le, labels) = labels.split_once('"').unwrap();
            let labels = labels.trim_start_matches(',').replace('"', "");
            let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
            all.entry(labels).or_default().push((le.parse().unwrap(), count.parse().unwrap()));
        }
        assert!(!all.is_empty(), "{name}");
        for (labels, buckets) in all {
            assert!(buckets.len() >= 2 && buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{name}: {buckets:?}");
            let last = buckets.last().unwrap();
            let count = self.samples[&format!("{name}_count{labels}")];
            assert_eq!((last.0, last.1), (f64::INFINITY, count), "{name}{labels}");
            assert!(self.samples.contains_key(&format!("{name}_sum{labels}")), "{name}{labels}");
        }
    }

    /// Returns a sample's value, or 0 if it has never been counted.
    pub(crate) fn get(&self, sample: &str) -> f64 {
        self.samples.get(&format!("tidegate_{sample}")).copied().unwrap_or(0.0)
    }

    /// Returns by how much counters and histogram counts differ from `before`, without the unchanged ones.
    pub(crate) fn since(&self, before: &Self) -> BTreeMap<String, f64> {
        let counts = |name: &str| {
            let name = name.split('{').next().unwrap_or(name);
            name.starts_with("tidegate_") && (name.ends_with("_total") || name.ends_with("_count"))
        };
        let differences = self.samples.iter().filter(|(name, _)| counts(name)).map(|(name, value)| {
            let name = name.strip_prefix("tidegate_").unwrap_or(name);
            (name.to_owned(), value - before.get(name))
        });
        differences.filter(|(_, difference)| *difference != 0.0).collect()
    }
}
