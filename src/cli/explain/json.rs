//! Prints an explanation as one JSON object.

use super::{Explanation, MAX_LISTED_ALL};
use crate::analysis::exposed::{self, Gap};
use crate::analysis::path::CriticalPath;
use crate::analysis::slower::FACTORS;
use crate::analysis::smallest_fit::Solution;
use crate::analysis::whatif::Effect;
use crate::analysis::{compile, peak, why};
use serde_json::{Value, json};
use shardlab_plan::record::Run;
use shardlab_plan::units::Picos;

pub(super) fn object(e: &Explanation) -> Value {
    let p = &e.prediction;
    let m = &p.run.memory;
    json!({
        "scenario": p.scenario.name,
        "program_digest": p.run.program_digest,
        "hardware": p.run.hardware,
        "step_ms": p.step_ms(),
        "parameters": p.program.meta.parameters,
        "verdict": e.verdict.json(&e.next),
        "warnings": e.warnings,
        "why": why::sentences(p),
        "critical_path": path(&e.path),
        "exposed_ms": exposed(&p.run, &e.gaps),
        "memory": {
            "peak_allocated_bytes": m.peak_allocated,
            "phase": m.at.phase.name(),
            "unit": p.program.units[m.at.unit.index()].name,
            "step": m.at.step,
            "instr": m.at.instr,
            "by_role": m.by_role.iter().map(|(r, b)| (r.name().to_owned(), b.0.into())).collect::<serde_json::Map<_, _>>(),
            "by_unit": m.by_unit.iter().map(|(u, b)| (u.clone(), b.0.into())).collect::<serde_json::Map<_, _>>(),
            "largest": peak::largest(&p.program, m.at.instr, MAX_LISTED_ALL),
        },
        "compile_modes": e.tried.compile.iter().map(|(mode, made)| match made {
            Ok(c) => json!({
                "mode": compile::name(*mode), "step_ms": c.step_ms, "kernels": c.kernels,
                "kernel_ms": ms(c.kernel_time), "host_ms": ms(c.host), "guards_ms": ms(c.guards),
                "graph_breaks_ms": ms(c.graph_breaks), "host_exposed_ms": ms(c.host_exposed),
                "peak_allocated_bytes": c.peak_allocated,
            }),
            Err(error) => json!({ "mode": compile::name(*mode), "impossible": error.reason() }),
        }).collect::<Vec<_>>(),
        "base": effect(&e.base),
        "smallest_fit": e.tried.smallest_fit.as_ref().and_then(|s| s.best()).map(solution),
        "more_gpus": e.tried.smallest_fit.as_ref().and_then(|s| s.more_gpus.as_ref()).map(solution),
        "fits_with": e.tried.smallest_fit.iter().flat_map(|s| s.solutions.iter().chain(&s.narrow)).map(solution).collect::<Vec<_>>(),
        "slower": e.tried.slower.iter().flat_map(|s| FACTORS.iter().zip(s.step_ms).map(|(factor, ms)| json!({
            "part": s.part.name(), "factor": factor, "step_ms": ms,
        }))).collect::<Vec<_>>(),
        "what_if": e.tried.what_ifs.iter().map(|w| match &w.effect {
            Ok(x) => json!({ "set": w.change.overrides, "effect": effect(x) }),
            Err(error) => json!({ "set": w.change.overrides, "impossible": error.reason() }),
        }).collect::<Vec<_>>(),
        "float8": super::float8::object(&e.tried.float8),
        "experts": e.tried.experts.iter().map(|(about, w)| match &w.effect {
            Ok(x) => json!({ "about": about, "set": w.change.overrides, "effect": effect(x) }),
            Err(error) => json!({ "about": about, "set": w.change.overrides, "impossible": error.reason() }),
        }).collect::<Vec<_>>(),
    })
}

fn ms(t: Picos) -> f64 {
    t.ms()
}

/// Returns the critical path.
pub(super) fn path(path: &CriticalPath) -> Value {
    json!({
        "spans": path.spans,
        "length_ms": ms(path.length),
        "between_ms": ms(path.between),
        "host_first_ms": ms(path.host_first),
        "by_work_ms": path.by_work.iter().map(|(w, t)| (w.name().to_owned(), ms(*t).into())).collect::<serde_json::Map<_, _>>(),
        "by_unit_ms": path.by_unit.iter().map(|(u, t)| (u.clone(), ms(*t).into())).collect::<serde_json::Map<_, _>>(),
        "pieces": path.pieces.iter().map(|x| json!({
            "work": x.work, "unit": x.unit, "phase": x.phase, "spans": x.spans,
            "at_ms": ms(x.start), "ms": ms(x.length),
        })).collect::<Vec<_>>(),
    })
}

/// Returns the exposed time.
pub(super) fn exposed(run: &Run, gaps: &[Gap]) -> Value {
    json!({
        "total": run.exposed_total().ms(),
        "by_cause": run.exposed.iter().map(|(c, t)| (c.name().to_owned(), t.ms().into())).collect::<serde_json::Map<_, _>>(),
        "groups": exposed::groups(gaps).iter().map(|g| json!({
            "cause": g.cause, "waited_for": g.awaited.name, "phase": g.awaited.phase,
            "behind": g.behind, "gaps": g.count, "ms": ms(g.total),
        })).collect::<Vec<_>>(),
        "longest": exposed::longest(gaps.to_vec(), MAX_LISTED_ALL).iter().map(|g| json!({
            "cause": g.cause, "waited_for": g.awaited.name, "phase": g.awaited.phase, "unit": g.unit,
            "behind": g.behind, "at_ms": ms(g.start), "ms": ms(g.length), "why": g.why,
        })).collect::<Vec<_>>(),
    })
}

fn solution(s: &Solution) -> Value {
    json!({ "set": s.change.overrides, "options": s.options, "effect": effect(&s.effect) })
}

fn effect(e: &Effect) -> Value {
    json!({
        "step_ms": e.step_ms,
        "tokens_per_s_per_gpu": e.tokens_per_s,
        "peak_allocated_bytes": e.peak_allocated,
        "peak_reserved_bytes": e.peak_reserved,
        "free_bytes": e.free_bytes,
        "fits": e.fit.word(),
        "row_shortage": e.shortage,
    })
}
