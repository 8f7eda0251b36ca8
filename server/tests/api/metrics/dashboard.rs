//! The dashboard and the alerts in `docker/`: Grafana can import the dashboard, and every metric that they use exists.

use std::collections::BTreeSet;

use serde_json::Value;

use super::scrape::Scrape;

/// PromQL words that contain an underscore but are not metrics.
const LANGUAGE: [&str; 3] = ["histogram_quantile", "label_values", "group_left"];

fn dashboard() -> Value {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docker/grafana-dashboard.json");
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Returns the metrics in an expression: words with an underscore, outside label matchers and ranges.
fn metrics(expression: &str) -> BTreeSet<String> {
    let mut outside = String::new();
    let mut depth = 0;
    for c in expression.chars() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            _ if depth == 0 => outside.push(c),
            _ => {}
        }
    }
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = outside.split(|c| !is_word(c)).filter(|word| word.starts_with(|c: char| c.is_ascii_alphabetic()));
    words.filter(|word| word.contains('_') && !LANGUAGE.contains(word)).map(str::to_owned).collect()
}

/// Returns the expressions of all panels and variables.
fn expressions(dashboard: &Value) -> Vec<String> {
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let variables = dashboard["templating"]["list"].as_array().unwrap().iter();
    let of_panels = targets.map(|target| target["expr"].as_str().unwrap().to_owned());
    of_panels.chain(variables.filter_map(|variable| Some(variable["query"]["query"].as_str()?.to_owned()))).collect()
}

/// Returns the expressions of the alerts.
fn alerts() -> Vec<String> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docker/alerts.yml");
    let file = std::fs::read_to_string(file).unwrap();
    file.lines().filter_map(|line| Some(line.trim().strip_prefix("expr: ")?.to_owned())).collect()
}

/// Checks that the dashboard and the alerts use only metrics in `scrape`, and that every metric is on a panel.
pub(crate) fn check(scrape: &Scrape) {
    let dashboard = dashboard();
    let shown: BTreeSet<&str> = scrape.samples.keys().map(|name| name.split('{').next().unwrap_or(name)).collect();
    let expressions = expressions(&dashboard);
    assert!(expressions.len() > 50, "{} expressions", expressions.len());
    // These words are labels in grouping clauses, not metrics.
    let labels = ["finished_reason", "fingerprint"];
    let asked: BTreeSet<String> = expressions.iter().flat_map(|expression| metrics(expression)).collect();
    for name in asked.iter().filter(|name| !labels.contains(&name.as_str())) {
        assert!(shown.contains(name.as_str()), "{name} is asked for, and is not there");
    }
    let alerts = alerts();
    assert!(alerts.len() > 10, "{alerts:?}");
    for name in alerts.iter().flat_map(|expression| metrics(expression)) {
        assert!(shown.contains(name.as_str()), "{name} is in an alert, and is not there");
    }
    // Conversely, every metric is on a panel.
    let family = |name: &str| {
        let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
        histogram.filter(|name| scrape.families.contains_key(*name)).unwrap_or(name).to_owned()
    };
    let asked: BTreeSet<String> = asked.iter().map(|name| family(name)).collect();
    let unseen: Vec<&String> = scrape.families.keys().filter(|name| !asked.contains(*name)).collect();
    assert!(unseen.is_empty(), "on no panel: {unseen:?}");
}

#[test]
fn the_dashboard_can_be_imported() {
    let dashboard = dashboard();
    assert!(dashboard["id"].is_null() && dashboard["uid"].is_string() && dashboard["title"].is_string());
    assert!(dashboard["schemaVersion"].as_u64().unwrap() >= 36);
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    assert_eq!((&variables[0]["name"], &variables[0]["type"]), (&"datasource".into(), &"datasource".into()));
    let (mut ids, mut rows) = (BTreeSet::new(), Vec::new());
    let mut covered = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "duplicate panel id");
        let place = |name: &str| panel["gridPos"][name].as_u64().unwrap();
        let (x, y, w, h) = (place("x"), place("y"), place("w"), place("h"));
        assert!(x + w <= 24, "{panel}");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(covered.insert(cell), "panels lie on each other: {}", panel["title"]);
        }
        if panel["type"] == "row" {
            rows.push(panel["title"].as_str().unwrap());
            continue;
        }
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
        assert!(!panel["description"].as_str().unwrap().is_empty());
        assert!(
            panel["targets"].as_array().unwrap().iter().all(|target| target["datasource"]["uid"] == "${datasource}")
        );
    }
    let want = [
        "Traffic",
        "Latency",
        "Tokens",
        "Batch and queue",
        "Sessions and states",
        "Several servers",
        "Errors",
        "Process",
    ];
    assert_eq!(rows, want);
}

#[test]
fn metrics_are_found_in_expressions() {
    let expression =
        "histogram_quantile(0.5, sum by (le) (rate(a_b_bucket{job=~\"$job\", x_y=\"1\"}[$__rate_interval]))) / c_d";
    assert_eq!(metrics(expression).into_iter().collect::<Vec<_>>(), ["a_b_bucket", "c_d"]);
}
