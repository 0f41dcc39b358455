//! Prints two runs side by side.

use super::super::output::{Failure, Out};
use super::super::table::Table;
use super::input::Made;
use shardlab_plan::record::Cause;
use shardlab_plan::units::{Bytes, Picos, signed};
use shardlab_reports::compare::{
    Change, CurvePair, KindError, Pair, Part, Prediction, Sized, UnitTime,
};
use shardlab_reports::stats::Comparison;

/// Maximum number of rows of a breakdown.
const MAX_ROWS: usize = 8;
/// Maximum number of units of the memory peak.
const UNITS: usize = 3;
/// Maximum number of options that sentences name.
const MAX_NAMED: usize = 3;
/// Bars of a curve drawn in characters.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

pub(super) fn print(
    pair: &Pair,
    made: [&Made; 2],
    all: bool,
    out: &mut Out,
) -> Result<(), Failure> {
    for (head, made) in pair.runs.iter().zip(made) {
        let set = made.view.scenario.overrides.join(" ");
        // Imported runs have no program.
        let program = match head.program_digest.as_str() {
            "" => String::new(),
            digest => format!(", program {digest}"),
        };
        let text = format!(
            "{} {} on {} x {}{} ({}) {set}",
            head.policy, head.scenario, head.world_size, head.hardware, program, made.origin,
        );
        out.labelled(&head.label, text.trim_end())?;
    }
    out.blank()?;
    out.paragraph(0, &pair.comparable.sentence())?;
    for warning in &pair.warnings {
        out.paragraph(0, &format!("Warning: {warning}"))?;
    }
    for sentence in &pair.why {
        out.paragraph(0, sentence)?;
    }
    out.blank()?;
    metrics(pair, out)?;
    if let Some(step) = &pair.step {
        statistics(step, pair.prediction.is_some(), out)?;
    }
    if pair.comparable.times() || all {
        details(pair, Shown { all }, out)?;
    }
    provenance(pair, all, out)
}

/// Determines which rows of a table to show.
#[derive(Clone, Copy)]
struct Shown {
    /// Whether to show all rows, including unchanged ones.
    all: bool,
}

impl Shown {
    /// Returns the rows to show.
    fn rows<T>(self, all: &[T], changed: impl Fn(&T) -> bool) -> Vec<&T> {
        all.iter().filter(|row| self.all || changed(row)).collect()
    }

    /// Returns the number of listed rows. The other rows are summed up or left out.
    fn most(self, rows: usize) -> usize {
        match self.all {
            true => rows,
            false => rows.min(MAX_ROWS),
        }
    }
}

/// Returns whether the change of a time is visible in a table of microseconds.
fn moved(time: [Picos; 2]) -> bool {
    ms(time[0]) != ms(time[1])
}

/// Prints where time and memory go.
fn details(pair: &Pair, shown: Shown, out: &mut Out) -> Result<(), Failure> {
    exposed(pair, shown, out)?;
    units(&pair.units, shown, out)?;
    let by_unit = match pair.units.is_empty() {
        true => &pair.breakdown.by_unit,
        false => &Vec::new(),
    };
    for (title, parts) in [
        ("wall time by phase", &pair.breakdown.by_phase),
        ("wall time by unit", by_unit),
        ("busy time by stream", &pair.breakdown.by_stream),
        ("busy time by kind", &pair.breakdown.by_kind),
    ] {
        breakdown(title, parts, shown, out)?;
    }
    match &pair.prediction {
        Some(p) => prediction(p, out)?,
        None => changes("single instructions", &pair.changes, out)?,
    }
    memory(pair, shown, out)?;
    for (quantity, curve) in [("loss", &pair.losses), ("gradient norm", &pair.grad_norms)] {
        if let Some(curve) = curve.as_ref().filter(|c| shown.all || c.diverges.is_some()) {
            overlay(quantity, curve, out)?;
        }
    }
    Ok(())
}

fn metrics(pair: &Pair, out: &mut Out) -> Result<(), Failure> {
    // Unrelated runs have no changes.
    let compared = pair.comparable.times();
    let titles = ["metric", ">A", ">B", ">change", ">%"];
    let columns = if compared { titles.len() } else { 3 };
    let mut table = Table::new(titles.into_iter().take(columns));
    for m in &pair.metrics {
        let (a, b) = (m.values[0], m.values[1]);
        let known = !a.is_nan() && !b.is_nan();
        let cells = [
            m.heading(),
            m.show(0),
            m.show(1),
            m.change().unwrap_or_else(|| "-".into()),
            if known && a != 0.0 {
                signed(100.0 * (b / a - 1.0), 1)
            } else {
                "-".into()
            },
        ];
        table.row(cells.into_iter().take(columns));
    }
    out.text(table)?;
    Ok(())
}

/// Prints the tests behind the verdict if anything was measured.
fn statistics(c: &Comparison, is_prediction: bool, out: &mut Out) -> Result<(), Failure> {
    if c.n == [1, 1] {
        return Ok(());
    }
    if c.has_few {
        // Intervals and tests of so few measurements say nothing.
        return Ok(());
    }
    let mut parts = vec![
        format!(
            "{}: ratio {:.4}, {:.0} % interval {:.4} to {:.4}, threshold {:.1} %, {} and {} samples",
            c.word(is_prediction),
            c.ratio.estimate,
            100.0 * c.ratio.level,
            c.ratio.low,
            c.ratio.high,
            100.0 * c.options.threshold,
            c.n[0],
            c.n[1],
        ),
        format!(
            "Cliff's delta {:+.2} ({})",
            c.cliffs_delta,
            c.magnitude.name()
        ),
    ];
    if let Some(test) = c.mann_whitney {
        let kind = if test.exact { "exact" } else { "approximate" };
        parts.push(format!(
            "Mann-Whitney U {:.1}, p {:.2e} ({kind})",
            test.u, test.p
        ));
    }
    if let Some(w) = c.welch {
        parts.push(format!(
            "Welch t {:+.2}, {:.1} degrees, p {:.2e}",
            w.t, w.df, w.p
        ));
    }
    if let (Some(power), Some(least)) = (c.power, c.detectable) {
        parts.push(format!(
            "power {power:.2} for the threshold; detectable with a probability of 80 %: {:.1} %",
            100.0 * least
        ));
    }
    out.blank()?;
    out.labelled("tests", &parts.join("; "))?;
    Ok(())
}

fn ms(t: Picos) -> String {
    t.show_ms(3)
}

fn change_ms(pair: [Picos; 2]) -> String {
    signed(pair[1].ms() - pair[0].ms(), 3)
}

fn exposed(pair: &Pair, shown: Shown, out: &mut Out) -> Result<(), Failure> {
    let causes = shown.rows(&pair.exposed, |c| moved(c.time));
    let mut table = Table::new(["exposed by cause", ">A ms", ">B ms", ">change"]);
    for c in causes {
        table.row([
            c.cause.name().into(),
            ms(c.time[0]),
            ms(c.time[1]),
            change_ms(c.time),
        ]);
    }
    print_table(table, out)?;
    let mut table = Table::new([
        "waited for",
        "phase",
        ">A ms",
        "times",
        "cause",
        ">B ms",
        "times",
        "cause",
        ">change",
    ]);
    let name = |c: Option<Cause>| c.map_or("", Cause::name).to_owned();
    let waits = shown.rows(&pair.waits, |w| moved(w.time));
    for w in waits.iter().take(shown.most(waits.len())) {
        table.row([
            w.of.name.clone(),
            w.of.phase.clone(),
            ms(w.time[0]),
            w.count[0].to_string(),
            name(w.cause[0]),
            ms(w.time[1]),
            w.count[1].to_string(),
            name(w.cause[1]),
            change_ms(w.time),
        ]);
    }
    print_table(table, out)
}

/// Prints a table preceded by a blank line, unless it is empty.
fn print_table(table: Table, out: &mut Out) -> Result<(), Failure> {
    if !table.is_empty() {
        out.blank()?;
        out.text(table)?;
    }
    Ok(())
}

fn breakdown(title: &str, parts: &[Part], shown: Shown, out: &mut Out) -> Result<(), Failure> {
    let parts = shown.rows(parts, |p| moved(p.time));
    let (listed, rest) = parts.split_at(shown.most(parts.len()));
    let mut table = Table::new([title, ">A ms", ">B ms", ">change"]);
    for p in listed {
        table.row(p.cells());
    }
    if !rest.is_empty() {
        let rest = Part {
            name: format!("{} more", rest.len()),
            time: [0, 1].map(|i| rest.iter().map(|p| p.time[i]).sum()),
        };
        table.row(rest.cells());
    }
    print_table(table, out)
}

/// Prints predicted and measured times by unit, with the part that explains most of the difference.
fn units(all: &[UnitTime], shown: Shown, out: &mut Out) -> Result<(), Failure> {
    let mut table = Table::new([
        "wall time by unit",
        ">predicted ms",
        ">measured ms",
        ">difference",
        "mostly",
    ]);
    for u in all.iter().take(shown.most(all.len())) {
        let mostly = u.cause.as_ref().map_or_else(String::new, |c| {
            format!("{} {}", c.part, change_ms([c.predicted, c.measured]))
        });
        table.row([
            u.unit.clone(),
            ms(u.predicted),
            ms(u.measured),
            change_ms([u.predicted, u.measured]),
            mostly,
        ]);
    }
    print_table(table, out)
}

fn prediction(p: &Prediction, out: &mut Out) -> Result<(), Failure> {
    out.blank()?;
    let mut table = Table::new(KindError::HEADS);
    for k in &p.by_kind {
        table.row(k.cells());
    }
    out.text(table)?;
    changes("worst predictions", &p.worst, out)
}

fn changes(title: &str, all: &[Change], out: &mut Out) -> Result<(), Failure> {
    if all.is_empty() {
        return Ok(());
    }
    out.blank()?;
    let mut table = Table::new([
        title,
        "unit",
        "phase",
        ">instr",
        ">A us",
        ">B us",
        ">change us",
    ]);
    for c in all {
        table.row(c.cells());
    }
    out.text(table)?;
    Ok(())
}

fn memory(pair: &Pair, shown: Shown, out: &mut Out) -> Result<(), Failure> {
    let m = &pair.memory;
    let mib = |b: [Bytes; 2]| signed(b[1].mib() - b[0].mib(), 1);
    let mut table = Table::new(["at the peak", ">A", ">B", ">change MiB"]);
    let changed = |part: &Sized| part.bytes[0] != part.bytes[1];
    let roles = shown.rows(&m.by_role, changed);
    let units = m.by_unit.iter().filter(|u| changed(u));
    for part in roles.into_iter().chain(units.take(UNITS)) {
        table.row(part.cells());
    }
    print_table(table, out)?;
    if let [Some(a), Some(b)] = &m.at {
        if a != b {
            out.line(format_args!("A peaks in {a}, B in {b}."))?;
        } else if shown.all {
            out.line(format_args!("Both peak in {a}."))?;
        }
    }
    curves(pair, shown, out)?;
    let mut table = Table::new(["peak in", "phase", ">A", ">B", ">change MiB"]);
    for p in m.places.iter().take(shown.most(m.places.len())) {
        table.row([
            p.unit.clone(),
            p.phase.to_owned(),
            p.bytes[0].to_string(),
            p.bytes[1].to_string(),
            mib(p.bytes),
        ]);
    }
    print_table(table, out)
}

/// Prints the curves of allocated bytes, for runs that have one.
fn curves(pair: &Pair, shown: Shown, out: &mut Out) -> Result<(), Failure> {
    let curves = &pair.memory.curves;
    let most = curves.iter().flatten().copied().max().unwrap_or(0);
    if most == 0 || curves[0] == curves[1] && !shown.all {
        return Ok(());
    }
    out.blank()?;
    out.line(format_args!(
        "allocated memory over the step (host time; full height {})",
        Bytes(most)
    ))?;
    for (head, curve) in pair.runs.iter().zip(curves) {
        if curve.is_empty() {
            continue;
        }
        let points: Vec<f64> = curve.iter().map(|b| *b as f64).collect();
        let bars = bars(&points, 0.0, most as f64);
        out.line(format_args!("{}  {bars}", head.label))?;
    }
    Ok(())
}

/// Formats values as bars of eight heights.
fn bars(values: &[f64], low: f64, high: f64) -> String {
    let top = (LEVELS.len() - 1) as f64;
    let bar = |v: &f64| {
        if v.is_nan() {
            return '?';
        }
        let share = ((v - low) / (high - low)).clamp(0.0, 1.0);
        // All values of an empty range are drawn at the bottom.
        LEVELS[(share * top).round().max(0.0) as usize]
    };
    values.iter().map(bar).collect()
}

fn overlay(quantity: &str, curve: &CurvePair, out: &mut Out) -> Result<(), Failure> {
    out.blank()?;
    let title = format!("{quantity} at step");
    let mut table = Table::new([title.as_str(), ">A", ">B", ">difference"]);
    for d in &curve.shown {
        table.row([
            d.step.to_string(),
            format!("{:.6}", d.a),
            format!("{:.6}", d.b),
            format!("{:+.3e}", d.b - d.a),
        ]);
    }
    out.text(table)?;
    Ok(())
}

fn provenance(pair: &Pair, all: bool, out: &mut Out) -> Result<(), Failure> {
    let alignment = pair.alignment.sentence("A", "B");
    if let Some(sentence) = alignment.filter(|_| pair.comparable.times() || all) {
        out.blank()?;
        out.paragraph(0, &sentence)?;
    }
    let text = |v: &Option<String>| v.clone().unwrap_or_else(|| "-".into());
    let mut table = Table::new(["option", "A", "B"]);
    // A few options are already listed in an earlier sentence.
    if all || pair.options.len() > MAX_NAMED {
        for d in &pair.options {
            table.row([d.key.clone(), text(&d.values[0]), text(&d.values[1])]);
        }
    }
    print_table(table, out)?;
    let mut table = Table::new(["environment", "A", "B"]);
    // A setting of only one run shows how that run was made, and is not a difference between the
    // two.
    let differs = |[a, b]: &[Option<String>; 2]| all || a.is_some() && b.is_some();
    for (key, [a, b]) in pair.environment.iter().filter(|(_, v)| differs(v)) {
        table.row([key.clone(), text(a), text(b)]);
    }
    print_table(table, out)
}

#[cfg(test)]
mod tests {
    use super::bars;

    #[test]
    fn bars_span_the_range() {
        assert_eq!(bars(&[0.0, 3.5, 7.0, f64::NAN], 0.0, 7.0), "▁▅█?");
        assert_eq!(bars(&[1.0, 1.0], 1.0, 1.0), "▁▁");
    }
}
