//! The form of one value against the key table.

use super::error::ScenarioError;
use super::keys::{Accept, Key, expected};
use super::merge::Document;
use super::value::{Datum, Value};
use crate::names::nearest;

/// Refuses a value that has none of the key's forms.
pub(crate) fn form(document: &Document, key: Key, value: &Value) -> Result<(), ScenarioError> {
    let accepts = key.info().accepts;
    if accepts.iter().any(|a| accepted(a, value)) {
        return Ok(());
    }
    Err(refuse(document, &key.path(), accepts, value))
}

fn accepted(accept: &Accept, value: &Value) -> bool {
    match (accept, &value.datum) {
        (Accept::Bool, Datum::Bool(_)) => true,
        (Accept::Integer(a, b), Datum::Int(_)) => {
            value.integer().is_some_and(|n| (*a..=*b).contains(&n))
        }
        (Accept::Number(a, b), Datum::Int(_) | Datum::Float(_)) => value
            .number()
            .is_some_and(|x| x.is_finite() && (*a..=*b).contains(&x)),
        (Accept::Bytes(a, b), Datum::Int(_) | Datum::Str(_)) => {
            value.bytes().is_some_and(|n| (*a..=*b).contains(&n))
        }
        (Accept::Size(a, b), Datum::Str(_)) => {
            value.bytes().is_some_and(|n| (*a..=*b).contains(&n))
        }
        (Accept::Choice(names), Datum::Str(s)) => names.contains(&s.as_str()),
        (Accept::Path(ending), Datum::Str(s)) => s.len() > ending.len() && s.ends_with(ending),
        (Accept::Text, Datum::Str(s)) => !s.is_empty(),
        (Accept::List(of), Datum::Array(values)) => {
            !values.is_empty() && values.iter().all(|v| accepted(of, v))
        }
        (Accept::Tuple(of, n), Datum::Array(values)) => {
            values.len() == *n && values.iter().all(|v| accepted(of, v))
        }
        (Accept::Short(of, n), Datum::Array(values)) => {
            (1..=*n).contains(&values.len()) && values.iter().all(|v| accepted(of, v))
        }
        (Accept::Empty, Datum::Array(values)) => values.is_empty(),
        (Accept::Table(fields), Datum::Table(entries)) => {
            let known = |name: &str| fields.iter().find(|(k, _)| *k == name);
            !entries.is_empty()
                && entries
                    .iter()
                    .all(|e| known(&e.key).is_some_and(|(_, a)| accepted(a, &e.value)))
        }
        (Accept::Map(of), Datum::Table(entries)) => entries.iter().all(|e| accepted(of, &e.value)),
        _ => false,
    }
}

/// A number without a unit, as a size was written.
fn bare_number(value: &Value) -> Option<String> {
    let text = match &value.datum {
        Datum::Str(s) => s.trim().to_owned(),
        Datum::Int(_) | Datum::Float(_) => value.describe(),
        _ => return None,
    };
    text.parse::<f64>().is_ok_and(|n| n > 0.0).then_some(text)
}

/// The error for a value of no accepted form: about the innermost part that is wrong.
fn refuse(document: &Document, path: &str, accepts: &[Accept], value: &Value) -> ScenarioError {
    match &value.datum {
        Datum::Array(values) => {
            for accept in accepts {
                let Some(of) = accept.items() else {
                    continue;
                };
                if let Some(i) = values.iter().position(|v| !accepted(&of, v)) {
                    return refuse(
                        document,
                        &format!("{path}[{i}]"),
                        std::slice::from_ref(&of),
                        &values[i],
                    );
                }
                let (n, want) = (values.len(), accept.describe());
                return document
                    .error(
                        value.origin,
                        format!("`{path}` must be {want}, not a list of {n}"),
                    )
                    .with_expected(want);
            }
        }
        Datum::Table(entries) => {
            for accept in accepts {
                if let Accept::Map(of) = accept
                    && let Some(e) = entries.iter().find(|e| !accepted(of, &e.value))
                {
                    let path = format!("{path}.{:?}", e.key);
                    return refuse(document, &path, std::slice::from_ref(*of), &e.value);
                }
                let Accept::Table(fields) = accept else {
                    continue;
                };
                for e in entries {
                    match fields.iter().find(|(k, _)| *k == e.key) {
                        Some((_, a)) if accepted(a, &e.value) => {}
                        Some((_, a)) => {
                            return refuse(
                                document,
                                &format!("{path}.{}", e.key),
                                std::slice::from_ref(a),
                                &e.value,
                            );
                        }
                        None => {
                            let near = nearest(&e.key, fields.iter().map(|(k, _)| *k));
                            return document
                                .error(e.key_origin, format!("unknown key `{}` in `{path}`", e.key))
                                .with_expected(accept.describe())
                                .with_help(match near {
                                    Some(n) => format!("did you mean `{n}`?"),
                                    None => format!("expected {}", accept.describe()),
                                });
                        }
                    }
                }
            }
        }
        _ => {}
    }
    let want = expected(accepts);
    let error = document
        .error(
            value.origin,
            format!("`{path}` must be {want}, not {}", value.describe()),
        )
        .with_expected(want);
    let choices = accepts.iter().flat_map(|a| match a {
        Accept::Choice(names) => *names,
        _ => &[],
    });
    if value.array().is_none()
        && accepts
            .iter()
            .any(|a| matches!(a, Accept::List(of) if accepted(of, value)))
        && let Some(s) = value.str()
    {
        return error.with_help(match nearest(s, choices.copied()) {
            Some(near) => format!("did you mean \"{near}\", or a list: [{s:?}]?"),
            None => format!("write a list: [{s:?}]"),
        });
    }
    if accepts.iter().any(|a| matches!(a, Accept::Size(..)))
        && let Some(number) = bare_number(value)
    {
        return error.with_help(format!("did you mean \"{number}GiB\"?"));
    }
    match value.str() {
        Some(s) if s == "true" || s == "false" => match accepts.contains(&Accept::Bool) {
            true => error.with_help(format!("write {s} without quotes")),
            false => error,
        },
        Some(s) => error.with_near(nearest(s, choices.copied())),
        None => error,
    }
}
