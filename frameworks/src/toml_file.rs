//! TOML as a tree.

use crate::error::ConfigError;
use crate::tree::{Name, Node, Value};
use shardlab_plan::scenario::Position;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Reads a document.
///
/// # Errors
/// Fails on a syntax error; the error has its position.
pub(crate) fn parse(file: &str, text: &str) -> Result<Node, ConfigError> {
    let table = DeTable::parse(text).map_err(|e| {
        let at = e.span().map_or(0, |s| s.start);
        let message = format!("not valid TOML: {}", e.message());
        ConfigError::at(file, Position::of(text, at), message)
    })?;
    Ok(map(text, 0, table.get_ref()))
}

fn map(text: &str, start: usize, table: &DeTable<'_>) -> Node {
    let mut entries: Vec<(usize, Name, Node)> = Vec::new();
    for (name, value) in table {
        let at = name.span().start;
        let name = Name {
            text: name.get_ref().to_string(),
            at: Position::of(text, at),
        };
        entries.push((at, name, node(text, value)));
    }
    // Tables list their names alphabetically; sorting by position restores the order of the file.
    entries.sort_by_key(|(at, ..)| *at);
    let entries = entries.into_iter().map(|(_, name, node)| (name, node));
    Node::new(Position::of(text, start), Value::Map(entries.collect()))
}

fn node(text: &str, value: &Spanned<DeValue<'_>>) -> Node {
    let start = value.span().start;
    let shown = || text.get(value.span()).unwrap_or_default().to_owned();
    let read = match value.get_ref() {
        DeValue::Table(table) => return map(text, start, table),
        DeValue::Array(items) => Value::List(items.iter().map(|item| node(text, item)).collect()),
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Integer(i) => i64::from_str_radix(i.as_str(), i.radix())
            .map_or_else(|_| Value::Text(shown()), Value::Integer),
        DeValue::Float(f) => f
            .as_str()
            .parse()
            .map_or_else(|_| Value::Text(shown()), Value::Float),
        DeValue::String(s) => Value::Text(s.to_string()),
        DeValue::Datetime(d) => Value::Text(d.to_string()),
    };
    Node::new(Position::of(text, start), read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_places_in_the_order_of_the_file() {
        let root = parse(
            "a.toml",
            "[z]\nb = 1\n[a.c]\nlr = 3e-4\nx = [\"é\", 1_000]\n",
        )
        .unwrap();
        let names: Vec<&str> = root.entries().iter().map(|(n, _)| &*n.text).collect();
        assert_eq!(names, ["z", "a"]);
        let lr = root.get("a.c.lr").unwrap();
        assert_eq!((lr.at.line, lr.at.column, lr.number()), (4, 6, Ok(3e-4)));
        assert_eq!(root.get("a.c.x").unwrap().to_string(), "[é, 1000]");
    }

    #[test]
    fn bad_files_say_where() {
        let error = parse("a.toml", "a = 1\nb = \n").unwrap_err().to_string();
        assert!(error.starts_with("a.toml:2:"), "{error}");
    }
}
