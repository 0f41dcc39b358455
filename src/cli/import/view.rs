//! Converts an imported run to the common view of runs.

use shardlab_import::RunImport;
use shardlab_import::infer::{family_names, infer};
use shardlab_import::measured::Instr;
use shardlab_plan::program::SectionKind;
use shardlab_plan::record::Run;
use shardlab_plan::units::Picos;
use shardlab_plan::{Program, Scenario, plan, scenario};
use shardlab_reports::RunView;
use shardlab_reports::view::{InstrView, ProgramView, ScenarioView, VIEW_FORMAT, Work};
use std::collections::BTreeMap;

/// Returns the view of an imported run. Its options are those that the trace determines.
pub(super) fn of(run: &RunImport) -> RunView {
    let m = &run.measured;
    let mut names = m.names.clone();
    let mut rules: BTreeMap<&str, u32> = BTreeMap::new();
    for instr in &m.instrs {
        rules.entry(instr.rule).or_insert_with(|| {
            names.push(instr.rule.to_owned());
            names.len() as u32 - 1
        });
    }
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for instr in &m.instrs {
        *counts.entry(kind(instr).to_owned()).or_default() += 1;
    }
    let facts = &run.facts;
    let inferred = infer(facts, &m.run.scenario, None).text;
    let scenario = scenario::parse(&m.run.scenario, &inferred, &[]).ok();
    let program = scenario.as_ref().and_then(|s| plan(s).ok());
    let mut measured = m.run.clone();
    let known = units(run);
    for (unit, _) in &mut measured.memory.by_unit {
        if let Some(i) = m.units.iter().position(|name| name == unit) {
            unit.clone_from(&known[i]);
        }
    }
    if let (Some(scenario), Some(program)) = (&scenario, &program)
        && let Some(mfu) = utilisation(scenario, program, &measured)
    {
        measured.mfu = mfu;
        measured.environment.insert(
            "mfu".to_owned(),
            format!(
                "derived, not measured: model FLOPs of the inferred scenario over the measured step and the peak of {}",
                scenario.mesh.hardware
            ),
        );
    }
    let value = |found: Option<u32>| found.unwrap_or(1);
    RunView {
        format: VIEW_FORMAT,
        run: measured,
        scenario: scenario_view(scenario.as_ref(), &m.run.scenario, inferred),
        program: ProgramView {
            digest: String::new(),
            units: known,
            streams: m.streams.clone(),
            counts: BTreeMap::from([(SectionKind::Steady, counts)]),
            parameters: facts.model.parameters.unwrap_or(0),
            parameter_count: None,
            dp_shard: value(facts.dp_shard.as_ref().map(|d| d.value)),
            dp_outer: value(facts.dp_outer.as_ref().map(|d| d.value)),
            micro_batches: u16::try_from(value(facts.accumulation.as_ref().map(|a| a.value)))
                .unwrap_or(u16::MAX),
            // If the trace does not determine the model, the recorded matmuls count.
            model_flops: program.map_or(m.flops, |p| p.meta.model_flops.0),
        },
        instrs: m
            .instrs
            .iter()
            .map(|i| instr_view(i, rules[i.rule]))
            .collect(),
        names,
        alive: Vec::new(),
        validations: Vec::new(),
        interrupted: false,
        experts: None,
    }
}

/// Returns the names of units as they are in predictions (blocks are `layers.N`), so that both can
/// be aligned.
fn units(run: &RunImport) -> Vec<String> {
    let known = family_names(&run.facts);
    let name = |unit: &String| {
        if let Some(known) = known.get(unit) {
            return known.clone();
        }
        match unit.rsplit_once('.') {
            Some((list, n)) if !list.contains('.') && n.bytes().all(|b| b.is_ascii_digit()) => {
                format!("layers.{n}")
            }
            _ => unit.clone(),
        }
    };
    run.measured.units.iter().map(name).collect()
}

/// Returns the utilisation of the device: model FLOPs of the inferred scenario's program relative
/// to the peak of its profile. Returns `None` without a step time or a profile.
fn utilisation(scenario: &Scenario, program: &Program, run: &Run) -> Option<f64> {
    let profile = shardlab_sim::hardware::load(&scenario.mesh.hardware).ok()?;
    let step = Picos::from_us(1e3 * run.step_ms());
    (step > Picos::ZERO).then(|| profile.utilisation(program, step))
}

/// Returns the options that the trace determines, as in the scenario that `infer` writes.
fn scenario_view(scenario: Option<&Scenario>, name: &str, text: String) -> ScenarioView {
    // An incomplete scenario has no options to compare.
    let mut view = scenario.map(ScenarioView::new).unwrap_or_default();
    name.clone_into(&mut view.name);
    view.about = "Imported from a profiler's trace.".to_owned();
    view.text = text;
    view
}

fn instr_view(instr: &Instr, rule: u32) -> InstrView {
    InstrView {
        id: instr.id,
        name: instr.name,
        rule,
        work: instr.work,
        role: instr.role,
        unit: instr.unit,
        phase: instr.phase,
        micro_batch: instr.micro_batch,
        stream: instr.stream,
        bytes: instr.bytes,
        flops: instr.flops,
    }
}

fn kind(instr: &Instr) -> &'static str {
    match instr.work {
        Some(w) if w.is_collective() => w.name(),
        Some(Work::Copy) => "copy",
        Some(_) => "launch",
        None => "alloc",
    }
}
