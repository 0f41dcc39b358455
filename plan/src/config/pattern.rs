//! The syntax of module patterns, and what they match.

use super::UnitPattern;

/// Parses one entry of `units`: globs joined by `+`, with an optional `=keep`.
pub(crate) fn unit_pattern(text: &str) -> Result<UnitPattern, String> {
    let (modules, keep) = match text.split_once('=') {
        None => (text, false),
        Some((modules, "keep")) => (modules, true),
        Some((_, other)) => {
            return Err(format!(
                "`={other}` is not a property of a unit; the only one is `=keep` (never resharded after forward)"
            ));
        }
    };
    let modules: Vec<String> = modules.split('+').map(|m| m.trim().to_owned()).collect();
    for module in &modules {
        glob(module)?;
    }
    Ok(UnitPattern { modules, keep })
}

/// Rejects a text that is not a glob over module paths.
pub(crate) fn glob(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("an empty module pattern".into());
    }
    if let Some(c) = text
        .chars()
        .find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '*')))
    {
        return Err(format!(
            "`{}` in a module pattern: only letters, digits, `_`, `.` and `*` can match a path",
            c.escape_debug()
        ));
    }
    if text.split('.').any(str::is_empty) {
        return Err(format!("`{text}` has an empty path component"));
    }
    Ok(())
}

/// Returns whether `glob` matches `path`, component by component, where `*` stands for any
/// characters of one component.
pub(crate) fn matches(glob: &str, path: &str) -> bool {
    // This quickly rejects most pairs in long lists of units.
    let literal = glob.find('*').unwrap_or(glob.len());
    if !path.starts_with(&glob[..literal]) {
        return false;
    }
    let (mut g, mut p) = (glob.split('.'), path.split('.'));
    loop {
        match (g.next(), p.next()) {
            (None, None) => return true,
            (Some(a), Some(b)) if component(a.as_bytes(), b.as_bytes()) => {}
            _ => return false,
        }
    }
}

/// Returns whether `glob` matches `path` or a module that contains it. The root contains
/// everything, but no glob matches it.
pub(crate) fn covers(glob: &str, path: &str) -> bool {
    let above = path.match_indices('.').map(|(dot, _)| &path[..dot]);
    !path.is_empty() && above.chain([path]).any(|p| matches(glob, p))
}

/// Returns whether `glob` matches consecutive components of `name`: the whole name, its end, or a
/// module in it.
pub(crate) fn part_of(glob: &str, name: &str) -> bool {
    let length = glob.split('.').count();
    let parts: Vec<&str> = name.split('.').collect();
    parts.windows(length).any(|part| {
        let mut pairs = glob.split('.').zip(part);
        pairs.all(|(g, p)| component(g.as_bytes(), p.as_bytes()))
    })
}

/// Matches wildcards greedily with one backtrack point: linear in practice, never exponential.
fn component(glob: &[u8], text: &[u8]) -> bool {
    let (mut g, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if g < glob.len() && glob[g] == b'*' {
            star = Some((g, t));
            g += 1;
        } else if g < glob.len() && glob[g] == text[t] {
            g += 1;
            t += 1;
        } else if let Some((sg, st)) = star {
            star = Some((sg, st + 1));
            g = sg + 1;
            t = st + 1;
        } else {
            return false;
        }
    }
    glob[g..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        let p = unit_pattern("norm+output=keep");
        assert_eq!(
            p,
            Ok(UnitPattern {
                modules: vec!["norm".into(), "output".into()],
                keep: true
            })
        );
        assert_eq!(
            unit_pattern("layers.*"),
            Ok(UnitPattern {
                modules: vec!["layers.*".into()],
                keep: false
            })
        );
        for bad in ["", "a+", "a=drop", "a b", "a..b", "a=keep=keep", ".a"] {
            assert!(unit_pattern(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn star_is_one_component() {
        assert!(matches("layers.*", "layers.31"));
        assert!(matches("*", "embedding"));
        assert!(matches("layers.*.mlp", "layers.0.mlp"));
        assert!(matches("layers.1*", "layers.12"));
        assert!(!matches("layers.*", "layers"));
        assert!(!matches("layers.*", "layers.0.mlp"));
        assert!(!matches("layers.*.mlp", "layers.0.attention"));
        assert!(!matches("layers.1*", "layers.2"));
    }

    #[test]
    fn globs_match_parts_of_names() {
        let name = "layers.3.attention_norm.weight";
        for glob in [
            "*norm*",
            "layers.3",
            "*.weight",
            "attention_norm.weight",
            name,
        ] {
            assert!(part_of(glob, name), "{glob}");
        }
        for glob in ["norm", "layers.weight", "3.weight", "*.bias", "*.*.*.*.*"] {
            assert!(!part_of(glob, name), "{glob}");
        }
    }

    #[test]
    fn globs_cover_descendants() {
        assert!(covers("layers", "layers.3"));
        assert!(covers("layers.*", "layers.3.attention.q"));
        assert!(covers("layers.3*", "layers.30.mlp"));
        assert!(covers("layers.3", "layers.3"));
        assert!(!covers("layers.3", "layers.30"));
        assert!(!covers("layers.*.mlp", "layers.3.attention"));
        assert!(!covers("layers.*.mlp", "layers.3"));
        assert!(!covers("*", ""));
    }
}
