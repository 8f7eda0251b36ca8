//! What the server's sources say: the routes that the router has, and the fields of the types that are read. Types with
//! flattened fields do not tell serde's own machinery their names, so the text is read.

use std::fs;
use std::path::Path;

fn source(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/api").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The names of the fields of a structure, as they are on the wire, sorted.
pub(crate) fn fields(file: &str, name: &str) -> Vec<String> {
    let text = source(file);
    let (_, rest) = text.split_once(&format!("{name} {{\n")).unwrap_or_else(|| panic!("no {name} in {file}"));
    let (mut fields, mut renamed, mut flattened) = (Vec::new(), None, false);
    for line in rest.lines().map(str::trim).take_while(|line| *line != "}") {
        if let Some((_, rest)) = line.split_once("rename = \"") {
            renamed = rest.split('"').next();
        }
        flattened |= line.starts_with("#[serde(flatten)") || line.starts_with("#[serde(skip)");
        if line.starts_with("//") || line.starts_with(['#', '$']) {
            continue;
        }
        let field = line.trim_start_matches("pub(super) ").trim_start_matches("pub(in crate::api) ").split(':').next();
        let field = renamed.take().or(field).unwrap();
        if !std::mem::take(&mut flattened) {
            fields.push(field.trim_start_matches("r#").to_owned());
        }
    }
    fields.sort();
    fields
}
