//! Prints a measured run as text.

use crate::cli::output::{Failure, Out};
use crate::cli::sim::report::{collectives, composition, heading};
use crate::cli::table::Table;
use shardlab_exec::train::{Outcome, ParamNorm, schedule};
use shardlab_plan::units::thousands;
use shardlab_plan::{Program, Scenario};

/// Number of steps in the table.
const MAX_STEPS: usize = 10;
/// Number of parameters in the table of norms.
const MAX_PARAMS: usize = 12;

pub(super) fn print(
    scenario: &Scenario,
    program: &Program,
    o: &Outcome,
    out: &mut Out,
) -> Result<(), Failure> {
    out.heading(heading(scenario, program, &o.run.hardware))?;
    summary(scenario, o, out)?;
    memory(program, o, out)?;
    collectives(&o.run, out)?;
    out.blank()?;
    out.text(steps(scenario, o))?;
    for (step, loss) in &o.validations {
        out.line(format_args!("validation after step {step}: loss {loss:.4}"))?;
    }
    if let Some((step, norms)) = o.param_norms.last() {
        out.blank()?;
        out.line(format_args!("norms of parameters after step {step}"))?;
        out.text(param_norms(norms))?;
        let more = norms.len().saturating_sub(MAX_PARAMS);
        if more > 0 {
            out.line(format_args!("and {more} more: --json has all"))?;
        }
    }
    Ok(())
}

/// Returns a table of the parameters with the largest gradients.
fn param_norms(norms: &[ParamNorm]) -> Table {
    let mut table = Table::new(["parameter", ">weights", ">gradient"]);
    let mut order: Vec<&ParamNorm> = norms.iter().collect();
    let gradient = |n: &ParamNorm| n.gradient.unwrap_or(-1.0);
    order.sort_by(|a, b| gradient(b).total_cmp(&gradient(a)));
    for n in order.into_iter().take(MAX_PARAMS) {
        let gradient = n
            .gradient
            .map_or_else(|| "-".to_owned(), |g| format!("{g:.4}"));
        table.row([n.name.clone(), format!("{:.4}", n.weight), gradient]);
    }
    table
}

fn summary(scenario: &Scenario, o: &Outcome, out: &mut Out) -> Result<(), Failure> {
    let s = o.run.summary();
    let unit = scenario.model.family.counted_in().rate();
    let samples = s.step_ms.samples.len();
    let step = if o.resumed_from == o.run.losses.len() as u64 {
        "none: the checkpoint is already at the last step, or after it".to_owned()
    } else if samples == 0 {
        "no time: the only step is the first one, which allocates and compiles what later steps reuse".to_owned()
    } else {
        format!(
            "{} ms   {} {unit}   MFU {}   mean {:.2}, p95 {:.2} of {samples}",
            thousands(s.step_ms.median, 2),
            thousands(s.tokens_per_s_per_gpu, 0),
            s.mfu
                .map_or_else(|| "n/a".to_owned(), |m| format!("{:.1} %", 100.0 * m)),
            s.step_ms.mean,
            s.step_ms.p95
        )
    };
    out.labelled("step", &step)?;
    if let Some(first) = o.run.first_step() {
        let setup = o.run.environment.get("seconds.devices");
        let setup = setup.map_or_else(String::new, |s| format!("   devices and kernels {s} s"));
        let seconds = first.ms() / 1e3;
        out.labelled("first", &format!("{seconds:.3} s{setup}"))?;
    }
    if let (Some(first), Some(last)) = (o.run.losses.first(), o.run.losses.last()) {
        let resumed = match o.resumed_from {
            0 => String::new(),
            n => format!(", resumed after step {n}"),
        };
        let text = format!(
            "{first:.4} to {last:.4} in {} steps{resumed}",
            o.run.losses.len()
        );
        out.labelled("loss", &text)?;
    }
    let data = o.run.environment.get("data").map_or("", String::as_str);
    out.labelled("data", data)?;
    if let Some(shared) = o.run.environment.get("gpu.shared") {
        out.labelled("GPU", shared)?;
    }
    Ok(())
}

fn memory(program: &Program, o: &Outcome, out: &mut Out) -> Result<(), Failure> {
    let m = &o.run.memory;
    out.labelled(
        "memory",
        &format!(
            "allocated {}, reserved {} per rank; {} persistent",
            m.peak_allocated, m.peak_reserved, m.persistent
        ),
    )?;
    let at = &m.at;
    out.labelled(
        "peak",
        &format!(
            "step {}, {} of {}, micro-batch {}",
            at.step,
            at.phase.name(),
            program.units[at.unit.index()].name,
            at.micro_batch
        ),
    )?;
    let roles = m.by_role.iter().map(|(r, b)| (r.name(), *b));
    out.labelled("", &composition(roles))?;
    Ok(())
}

/// Returns a table of the first and last steps, and of evenly spaced steps between them.
fn steps(scenario: &Scenario, o: &Outcome) -> Table {
    let mut table = Table::new([">step", ">loss", ">gradient norm", ">learning rate", ">ms"]);
    let n = o.run.losses.len();
    let shown = n.min(MAX_STEPS);
    let norms = o.run.reported_grad_norms();
    let times: Vec<String> = o
        .run
        .steps
        .iter()
        .filter(|s| s.section.is_training())
        .map(|s| format!("{:.2}", (s.end - s.start).ms()))
        .collect();
    for i in 0..shown {
        let step = if shown < 2 {
            0
        } else {
            i * (n - 1) / (shown - 1)
        };
        // Steps before a resumption have no times in this run.
        let time = step
            .checked_sub(n - times.len().min(n))
            .and_then(|t| times.get(t).cloned());
        table.row([
            (step + 1).to_string(),
            format!("{:.4}", o.run.losses[step]),
            norms
                .get(step)
                .map_or_else(|| "-".to_owned(), |g| format!("{g:.4}")),
            format!(
                "{:.3e}",
                schedule::learning_rate(&scenario.train, step as u64)
            ),
            time.unwrap_or_default(),
        ]);
    }
    table
}
