//! What 8-bit matmuls bring by layer, and where they do not pay.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use super::Explanation;
use crate::analysis::float8::{Float8, Layers};
use serde_json::{Value, json};
use shardlab_plan::record::basis::{milliseconds, number};

/// Prints a table of the layers, if any matmul runs in 8 bits.
pub(super) fn print(e: &Explanation, out: &mut Out) -> Result<(), Failure> {
    let Some(float8) = &e.tried.float8 else {
        return Ok(());
    };
    let basis = e.prediction.run.basis.as_ref();
    let shown = |ms: f64| number(ms, 3, basis);
    out.blank()?;
    out.heading(format_args!(
        "8-bit matmuls: a step of {}, {} in 16 bits",
        milliseconds(float8.step_ms, basis),
        milliseconds(float8.without_ms, basis)
    ))?;
    let titles = [
        "layers",
        "weight",
        ">matmuls ms",
        ">in 16 bits",
        ">casts ms",
        ">saved ms",
    ];
    let mut table = Table::new(titles);
    for l in &float8.layers {
        table.row([
            label(l),
            format!("{}x{}", l.sides[0], l.sides[1]),
            shown(l.matmuls_ms),
            shown(l.without_ms),
            shown(l.casts_ms),
            shown(l.saved_ms()),
        ]);
    }
    out.text(table)?;
    for sentence in float8.sentences() {
        out.paragraph(2, &sentence)?;
    }
    Ok(())
}

fn label(l: &Layers) -> String {
    match l.names.is_empty() {
        true => "(merged layers)".to_owned(),
        false => l.names.join(", "),
    }
}

/// Returns the same for JSON; null if no matmul runs in 8 bits.
pub(super) fn object(float8: &Option<Float8>) -> Value {
    let Some(float8) = float8 else {
        return Value::Null;
    };
    let layers = float8.layers.iter().map(|l| {
        json!({
            "names": l.names, "sides": l.sides, "matmuls_ms": l.matmuls_ms,
            "without_ms": l.without_ms, "casts_ms": l.casts_ms, "saved_ms": l.saved_ms(),
        })
    });
    json!({
        "step_ms": float8.step_ms,
        "without_ms": float8.without_ms,
        "layers": layers.collect::<Vec<_>>(),
        "exclude": float8.exclusion(),
        "sentences": float8.sentences(),
    })
}
