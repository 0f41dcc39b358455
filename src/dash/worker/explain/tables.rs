//! Where time and memory of a scenario go, as tables.

use crate::analysis::compile::{self, Mode};
use crate::analysis::slower::{FACTORS, Slower};
use crate::analysis::{exposed, path, peak};
use crate::dash::app::Tone;
use crate::dash::tables::Table;
use crate::predict::{PredictError, Prediction};
use shardlab_plan::config::CompileMode;
use shardlab_plan::record::basis::{milliseconds, number};
use shardlab_plan::units::Picos;

/// Maximum number of rows per table.
const ROWS: usize = 10;

/// Returns the tables that follow from one prediction.
pub(super) fn of(p: &Prediction) -> Vec<Table> {
    let mut all = exposed_time(p);
    all.extend(memory(p));
    all.push(critical_path(p));
    all
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", 100.0 * part as f64 / whole.max(1) as f64)
}

fn exposed_time(p: &Prediction) -> Vec<Table> {
    let run = &p.run;
    let basis = run.basis.as_ref();
    let gaps = exposed::gaps(&p.program, run);
    if gaps.is_empty() {
        return Vec::new();
    }
    let total = run.exposed_total();
    let step = run.recorded_to.saturating_sub(run.recorded_from);
    let title = format!(
        "Exposed time: {} ({})",
        milliseconds(total.ms(), basis),
        percent(total.0, step.0)
    );
    let mut groups = Table::new(title, &exposed::Group::HEADS);
    for g in exposed::groups(&gaps).iter().take(ROWS) {
        groups.row(Tone::Plain, g.cells(basis));
    }
    let head = [
        "waited for",
        "unit",
        "phase",
        "cause",
        ">at ms",
        ">ms",
        "why",
    ];
    let mut longest = Table::new("Longest gaps", &head);
    for g in exposed::longest(gaps, ROWS) {
        longest.row(Tone::Plain, g.cells(basis));
    }
    vec![groups, longest]
}

fn memory(p: &Prediction) -> Vec<Table> {
    let m = &p.run.memory;
    let title = format!(
        "Memory at the peak: {} allocated in {} of {}",
        m.peak_allocated,
        m.at.phase.name(),
        p.program.units[m.at.unit.index()].name
    );
    let mut roles = Table::new(title, &["role", ">bytes", ">share"]);
    for (role, bytes) in m.by_role.iter().take(ROWS) {
        let share = percent(bytes.0, m.peak_allocated.0);
        let cells = [role.name().to_owned(), bytes.to_string(), share];
        roles.row(Tone::Plain, cells);
    }
    let mut buffers = Table::new("Buffers at the peak", &peak::Alive::HEADS);
    for a in peak::largest(&p.program, m.at.instr, ROWS) {
        buffers.row(Tone::Plain, a.cells());
    }
    vec![roles, buffers]
}

fn critical_path(p: &Prediction) -> Table {
    let path = path::critical_path(&p.program, &p.run);
    let title = format!(
        "Critical path: {} kernels and collectives, {}",
        path.spans, path.length
    );
    let mut table = Table::new(title, &path::Piece::HEADS);
    for piece in path.pieces.iter().take(ROWS) {
        table.row(Tone::Plain, piece.cells());
    }
    let share = |t: Picos| percent(t.0, path.length.0);
    let kinds = path.by_work.iter();
    let mut kinds: Vec<String> = kinds
        .map(|(w, t)| format!("{} {}", w.name(), share(*t)))
        .collect();
    kinds.push(format!("idle between them {}", share(path.between)));
    table.notes.push(format!("By kind: {}.", kinds.join(", ")));
    table
}

/// Returns the table of compile modes; `None` if none is possible.
pub(super) fn modes(
    p: &Prediction,
    modes: &[(CompileMode, Result<Mode, PredictError>)],
) -> Option<Table> {
    let basis = p.run.basis.as_ref();
    let shown = |time: Picos| number(time.ms(), 2, basis);
    let head = [
        "mode",
        ">step ms",
        ">launches",
        ">kernels ms",
        ">host ms",
        ">wait ms",
        ">allocated",
    ];
    let mut table = Table::new("Compile modes", &head);
    for (mode, made) in modes {
        match made {
            Ok(m) => {
                let cells = [
                    compile::name(m.mode).to_owned(),
                    number(m.step_ms, 2, basis),
                    m.kernels.to_string(),
                    shown(m.kernel_time),
                    shown(m.host),
                    shown(m.host_exposed),
                    m.peak_allocated.to_string(),
                ];
                table.row(Tone::Plain, cells);
            }
            Err(e) => {
                let note = format!("{} is not possible: {}", compile::name(*mode), e.reason());
                table.notes.push(note);
            }
        }
    }
    (!table.rows.is_empty()).then_some(table)
}

/// Returns the effect of slower parts of the machine.
pub(super) fn slower(p: &Prediction, parts: &[Slower]) -> Table {
    let basis = p.run.basis.as_ref();
    let [little, twice] = FACTORS.map(|f| format!(">{f}x"));
    let head = ["component", little.as_str(), ">", twice.as_str(), ">"];
    let mut table = Table::new("If one component were slower", &head);
    for s in parts {
        table.row(Tone::Plain, s.cells(p.step_ms(), basis));
    }
    table
}
