//! The syntax of module patterns.

use super::types::UnitPattern;

/// Parses one entry of `units`: globs joined by `+`, with an optional `=keep`.
pub(crate) fn unit_pattern(text: &str) -> Result<UnitPattern, String> {
    let (modules, keep) = match text.split_once('=') {
        None => (text, false),
        Some((modules, "keep")) => (modules, true),
        Some((_, other)) => {
            return Err(format!(
                "`={other}` is no property of a unit; the only one is `=keep` (never resharded after forward)"
            ));
        }
    };
    let modules: Vec<String> = modules.split('+').map(|m| m.trim().to_owned()).collect();
    for module in &modules {
        glob(module)?;
    }
    Ok(UnitPattern { modules, keep })
}

/// Refuses what cannot be a glob over module paths.
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
}
