//! Compares a profile's measured collectives with predictions that do not use its tables, and with
//! NCCL's own estimates.

use super::{Args, Sheet};
use crate::cli::output::{Failure, Out, Status};
use serde::Serialize;
use shardlab_plan::ir::DType;
use shardlab_plan::units::{Bytes, signed};
use shardlab_sim::{CollectiveCheck, Profile, check_collectives, hardware};
use std::path::Path;

/// Payloads of at least this size are limited by links rather than by latencies. Training steps
/// consist mostly of these.
const LARGE: Bytes = Bytes(1 << 20);

/// Returns the profile that an argument refers to, if it does: the name of a shipped profile, or a
/// TOML file.
pub(super) fn profile(argument: &Path) -> Option<&str> {
    let name = argument.to_str()?;
    let toml = argument.extension().is_some_and(|e| e == "toml");
    (toml || hardware::shipped().contains(&name)).then_some(name)
}

/// The source of a prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Predictor {
    /// The simulator's formula, which depends only on the rates of the links.
    Formula,
    /// The profile's tables for other groups, scaled by the formula.
    Others,
    /// NCCL's tuner.
    Nccl,
}

impl Predictor {
    const ALL: [Self; 3] = [Self::Formula, Self::Others, Self::Nccl];

    const fn title(self) -> &'static str {
        match self {
            Self::Formula => "formula",
            Self::Others => "others",
            Self::Nccl => "NCCL",
        }
    }

    const fn of(self, check: &CollectiveCheck) -> Option<f64> {
        match self {
            Self::Formula => Some(check.formula_us),
            Self::Others => check.others_us,
            Self::Nccl => check.nccl_us,
        }
    }
}

/// Errors of one predictor, over large or small payloads.
#[derive(Debug, Serialize)]
struct Errors {
    predictor: Predictor,
    /// Whether the payloads are 1 MiB or more.
    large: bool,
    rows: usize,
    median_abs_percent: f64,
    worst_percent: f64,
    worst_row: String,
}

#[derive(Serialize)]
struct RowObject<'a> {
    kind: &'a str,
    dtype: Option<DType>,
    ranks: u32,
    nodes: u32,
    bytes: Bytes,
    measured_us: f64,
    formula_us: f64,
    others_us: Option<f64>,
    nccl_us: Option<f64>,
}

impl<'a> RowObject<'a> {
    const fn of(c: &'a CollectiveCheck) -> Self {
        Self {
            kind: c.kind.name(),
            dtype: c.dtype,
            ranks: c.ranks,
            nodes: c.nodes,
            bytes: c.bytes,
            measured_us: c.measured_us,
            formula_us: c.formula_us,
            others_us: c.others_us,
            nccl_us: c.nccl_us,
        }
    }
}

#[derive(Serialize)]
struct Totals<'a> {
    errors: &'a [Errors],
}

/// Prints the rows of a profile and the errors of the predictors.
///
/// # Errors
/// Fails if the profile cannot be read or no row matches.
pub(super) fn run(name: &str, args: &Args, out: &mut Out) -> Result<Status, Failure> {
    if args.max_error.is_some() {
        return Err(Failure::bad_input(
            "--max-error works on tables of runs, but this is a hardware profile",
        ));
    }
    let profile: Profile = hardware::load(name).map_err(Failure::bad_input)?;
    let mut rows = check_collectives(&profile);
    rows.retain(|r| args.rows.iter().all(|wanted| label(r).contains(wanted)));
    if rows.is_empty() {
        let of = if args.rows.is_empty() {
            "no [[collective]] table"
        } else {
            "no [[collective]] row matches all of --rows"
        };
        return Err(Failure::bad_input(format_args!("{name}: {of}")));
    }
    let errors: Vec<Errors> = [true, false]
        .into_iter()
        .flat_map(|large| Predictor::ALL.map(|p| errors(p, large, &rows)))
        .flatten()
        .collect();
    if args.json {
        for row in &rows {
            out.json(&RowObject::of(row))?;
        }
        out.json(&Totals { errors: &errors })?;
    } else {
        print(args.markdown, &rows, &errors, out)?;
    }
    Ok(Status::Done)
}

/// Describes the properties that distinguish rows.
fn label(c: &CollectiveCheck) -> String {
    let dtype = c.dtype.map(|d| format!(" {d}")).unwrap_or_default();
    let nodes = match c.nodes {
        1 => String::new(),
        n => format!(" on {n} nodes"),
    };
    format!(
        "{}{dtype} {} ranks{nodes} {}",
        c.kind.name(),
        c.ranks,
        c.bytes
    )
}

fn percent(predicted: f64, measured: f64) -> f64 {
    100.0 * (predicted / measured - 1.0)
}

/// Returns the errors of a predictor; `None` if it predicts nothing.
fn errors(predictor: Predictor, large: bool, rows: &[CollectiveCheck]) -> Option<Errors> {
    let of_size = rows.iter().filter(|r| (r.bytes >= LARGE) == large);
    let mut found: Vec<(f64, &CollectiveCheck)> = of_size
        .filter_map(|r| Some((percent(predictor.of(r)?, r.measured_us), r)))
        .collect();
    found.sort_by(|a, b| a.0.abs().total_cmp(&b.0.abs()));
    let (worst, row) = *found.last()?;
    Some(Errors {
        predictor,
        large,
        rows: found.len(),
        median_abs_percent: found[found.len() / 2].0.abs(),
        worst_percent: worst,
        worst_row: label(row),
    })
}

fn print(
    markdown: bool,
    rows: &[CollectiveCheck],
    errors: &[Errors],
    out: &mut Out,
) -> Result<(), Failure> {
    let shown: Vec<Predictor> = Predictor::ALL
        .into_iter()
        .filter(|p| rows.iter().any(|r| p.of(r).is_some()))
        .collect();
    let mut titles = vec!["collective".to_owned(), ">us".to_owned()];
    for p in &shown {
        titles.extend([format!(">{}", p.title()), ">error %".to_owned()]);
    }
    let line = |r: &CollectiveCheck| {
        let mut cells = vec![label(r), format!("{:.1}", r.measured_us)];
        for p in &shown {
            match p.of(r) {
                Some(us) => {
                    cells.extend([format!("{us:.1}"), signed(percent(us, r.measured_us), 1)])
                }
                None => cells.extend([String::new(), String::new()]),
            }
        }
        cells
    };
    Sheet {
        titles,
        rows: rows.iter().map(line).collect(),
    }
    .write(markdown, out)?;
    out.blank()?;
    let titles = [
        "predicted by",
        "payloads",
        ">rows",
        ">median |error| %",
        ">worst %",
        "worst row",
    ];
    let summary = |e: &Errors| {
        let size = if e.large {
            "1 MiB and larger"
        } else {
            "smaller"
        };
        vec![
            e.predictor.title().to_owned(),
            size.to_owned(),
            e.rows.to_string(),
            format!("{:.1}", e.median_abs_percent),
            signed(e.worst_percent, 1),
            e.worst_row.clone(),
        ]
    };
    Sheet {
        titles: titles.map(str::to_owned).to_vec(),
        rows: errors.iter().map(summary).collect(),
    }
    .write(markdown, out)?;
    if !markdown {
        out.blank()?;
        out.paragraph(0, "formula: from link rates only, as for hardware without measurements. others: from the profile's tables for other groups. NCCL: NCCL's own estimate.")?;
    }
    Ok(())
}
