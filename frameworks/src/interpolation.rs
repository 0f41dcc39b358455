//! OmegaConf's interpolations: `${path}`, `${.sibling}` and `${oc.env:NAME,default}`.

use crate::tree::{Node, Value, plain};
use std::borrow::Cow;

/// Maximum length of a chain of references.
const MAX_STEPS: usize = 8;

/// Returns the value that a node refers to. If the whole text is one reference, this is the value
/// at the other path; otherwise, references in the text are replaced by the texts they refer to.
/// References that cannot be resolved stay as they are.
pub(crate) fn resolve<'n>(root: &'n Node, path: &str, node: &'n Node) -> Cow<'n, Node> {
    let Some(text) = node.text().filter(|t| t.contains("${")) else {
        return Cow::Borrowed(node);
    };
    if let Some(found) = whole(text).and_then(|name| target(root, path, name)) {
        return found;
    }
    match replaced(root, path, text) {
        Some(text) => Cow::Owned(Node::new(node.at, Value::Text(text))),
        None => Cow::Borrowed(node),
    }
}

/// Returns the text between the braces if the whole text is one reference.
fn whole(text: &str) -> Option<&str> {
    let inner = text.strip_prefix("${")?.strip_suffix('}')?;
    (!inner.contains(['{', '}'])).then_some(inner)
}

/// Returns the value that a reference in the map of `path` refers to.
fn target<'n>(root: &'n Node, path: &str, name: &str) -> Option<Cow<'n, Node>> {
    let (mut path, mut name) = (path.to_owned(), name.to_owned());
    for _ in 0..MAX_STEPS {
        if let Some(variable) = name.strip_prefix("oc.env:") {
            let (_, default) = variable.split_once(',')?;
            let at = root.at;
            return Some(Cow::Owned(Node::new(at, plain(default.trim()))));
        }
        path = match name.strip_prefix('.') {
            Some(sibling) => match path.rsplit_once('.') {
                Some((map, _)) => format!("{map}.{sibling}"),
                None => sibling.to_owned(),
            },
            None => name,
        };
        let found = root.get(&path)?;
        match found.text().and_then(whole) {
            Some(next) => name = next.to_owned(),
            None => return Some(Cow::Borrowed(found)),
        }
    }
    None
}

/// Returns a text with all references replaced, or `None` if one of them cannot be resolved.
fn replaced(root: &Node, path: &str, text: &str) -> Option<String> {
    let mut all = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let (name, after) = after.split_once('}')?;
        let found = target(root, path, name)?;
        all += before;
        all += &match &found.value {
            Value::Text(text) if text.contains("${") => return None,
            Value::Text(text) => text.clone(),
            Value::Integer(n) => n.to_string(),
            _ => return None,
        };
        rest = after;
    }
    Some(all + rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::yaml;

    #[test]
    fn references_are_followed() {
        let root = yaml::parse(
            "a.yaml",
            "dir: /models\nlength: 4096\nalso: ${length}\ndata:\n  n: 2\n  same: ${.n}\n  \
             model: ${dir}/llama-${data.n}\n  size: ${also}\n  workers: ${oc.env:WORKERS, 4}\n  \
             home: ${oc.env:HOME}\n  loop: ${data.loop}\n  more: x-${nothing}\n",
        )
        .unwrap();
        let of = |path: &str| {
            let node = root.get(path).unwrap();
            resolve(&root, path, node).value.clone()
        };
        assert_eq!(of("data.size"), Value::Integer(4096));
        assert_eq!(of("data.same"), Value::Integer(2));
        assert_eq!(of("data.workers"), Value::Integer(4));
        assert_eq!(of("data.model"), Value::Text("/models/llama-2".into()));
        for path in ["data.home", "data.loop", "data.more"] {
            assert_eq!(of(path), root.get(path).unwrap().value, "{path}");
        }
    }
}
