//! Measures the GPUs of this machine: a hardware profile of the CUDA device.
//!
//! Kernels are timed by the GPU's own records where they run, within training steps, and matrix products and attention also on
//! a grid of sizes; collectives by kind, size and ranks, alone and beside kernels; host costs by issuing more than the
//! device can keep up with, and by whole steps that nothing records.

mod bench;
mod grid;
mod host;
mod models;
mod render;
mod warm;
mod wires;

use super::Options;
use super::steps::{Between, Observed, On, Totals, means_alone, run};
use crate::device::cuda::{Context, CudaFactory, CudaOptions};
use crate::train::TrainError;
use bench::Bench;
use shardlab_plan::program::{Op, SectionKind};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long steps follow one another before any is recorded.
const WARM: Duration = Duration::from_millis(1500);
/// Kernels that what a recording adds can be seen in.
const SHORT_US: f64 = 200.0;

/// What was measured.
#[derive(Debug, Default)]
struct Measured {
    gpu: String,
    gpus: u32,
    driver: i32,
    multiprocessors: u32,
    memory_mib: u64,
    steps: Totals,
    gemm: Vec<super::grid::GemmTable>,
    attention: Vec<super::grid::AttentionRows>,
    collectives: Vec<super::collectives::Table>,
    host: host::Host,
    wires: wires::Together,
    warm: warm::Warm,
    /// Bytes on the device beside the engine's: without a communicator, and for each.
    context_bytes: u64,
    communicator_bytes: u64,
}

/// Measures GPUs with up to `options.ranks` ranks; the profile's text.
///
/// # Errors
/// [`TrainError`] when there is no GPU, or a calibration step cannot be planned or performed.
pub fn calibrate_cuda(
    options: &Options,
    library_path: &[PathBuf],
    note: &mut dyn FnMut(&str),
) -> Result<String, TrainError> {
    let begin = Instant::now();
    let fault = |e: String| TrainError::Plan(e);
    let count = crate::device::cuda::gpus(library_path).map_err(|e| fault(e.to_string()))?;
    let ranks = options.ranks.min(count).max(1);
    let context = Context::new(0, library_path).map_err(|e| fault(e.to_string()))?;
    let (_, total) = context.memory().map_err(|e| fault(e.to_string()))?;
    let factory = CudaFactory::new(CudaOptions {
        library_path: library_path.to_vec(),
        ..CudaOptions::default()
    });
    let mut m = Measured {
        gpu: context.name.clone(),
        gpus: ranks,
        driver: context.driver,
        multiprocessors: context.multiprocessors,
        memory_mib: total >> 20,
        ..Measured::default()
    };
    let mut said = |what: &str| note(&format!("{:>4.0?} s  {what}", begin.elapsed().as_secs()));
    // First: whatever runs leaves code of libraries on the device.
    said("memory beside the engine's");
    if let Err(e) = footprint(&factory, ranks, &mut m) {
        said(&format!("memory beside the engine's: {e}"));
    }
    said("matrix products, attention, host");
    let one = Bench::new(&factory, 1);
    grid::measure(&one, &mut m).map_err(fault)?;
    host::measure(&one, &mut m.host).map_err(fault)?;
    m.host.gap_us = host::gap(&one, &Bench::new(&factory, ranks)).map_err(fault)?;
    if ranks > 1 {
        said("collectives, alone and beside kernels");
        let mut sizes = vec![ranks];
        if ranks > 2 {
            sizes.insert(0, 2);
        }
        for ranks in sizes {
            let bench = Bench::new(&factory, ranks);
            m.collectives.extend(wires::alone(&bench).map_err(fault)?);
            m.wires = wires::together(&bench).map_err(fault)?;
        }
    }
    steps(&factory, ranks, options.budget, &begin, &mut said, &mut m)?;
    warm::as_in_steps(&mut m);
    said("done");
    Ok(render::profile(&options.name, &m))
}

/// Bytes on the device beside the engine's, with one communicator and with two.
fn footprint(factory: &CudaFactory, ranks: u32, m: &mut Measured) -> Result<(), TrainError> {
    let on = On {
        factory,
        hardware: "h200-nvlink",
        steps: (1, 1),
        plain: 0,
        warm: Duration::ZERO,
    };
    let (model, variant, policies) = models::footprints();
    let mut found = Vec::new();
    for policy in policies {
        let observed = run(&on, &model, variant, policy, ranks, Duration::ZERO)?;
        let communicators = if ranks > 1 {
            let used = observed.program.collectives.iter().map(|c| c.comm.0);
            used.collect::<BTreeSet<u8>>().len() as u64
        } else {
            0
        };
        found.push((communicators, observed.foreign.unwrap_or(0)));
    }
    (m.context_bytes, m.communicator_bytes) = apart(&found);
    Ok(())
}

/// A context's bytes and a communicator's, from what there was with so many communicators.
fn apart(found: &[(u64, u64)]) -> (u64, u64) {
    let (Some(&few), Some(&many)) = (
        found.iter().min_by_key(|f| f.0),
        found.iter().max_by_key(|f| f.0),
    ) else {
        return (0, 0);
    };
    let more = many.1.saturating_sub(few.1);
    let each = more.checked_div(many.0 - few.0).unwrap_or(0);
    (few.1.saturating_sub(few.0 * each), each)
}

/// Times within training steps, as long as there is time.
fn steps(
    factory: &CudaFactory,
    ranks: u32,
    budget: Duration,
    begin: &Instant,
    said: &mut dyn FnMut(&str),
    m: &mut Measured,
) -> Result<(), TrainError> {
    let on = On {
        factory,
        hardware: "h200-nvlink",
        steps: (3, 3),
        plain: 3,
        warm: WARM,
    };
    let mut between = Between::default();
    let mut hosts = Vec::new();
    for (name, model, variant, policy, sharded) in models::runs() {
        let world = if sharded { ranks } else { 1 };
        if begin.elapsed() > budget {
            said(&format!("no time for {name} and what follows"));
            break;
        }
        said(&name);
        let observed = match run(&on, &model, variant, policy, world, Duration::ZERO) {
            Ok(observed) => observed,
            // The profile can do without what only several ranks show.
            Err(e) if sharded => {
                said(&format!("{name}: {e}"));
                continue;
            }
            Err(e) => return Err(e),
        };
        if world == 1 {
            if m.communicator_bytes == 0 {
                m.context_bytes = m.context_bytes.max(observed.foreign.unwrap_or(0));
            }
            between.add(&observed);
            hosts.extend(host_cost(&observed, &m.host));
            m.warm.add(&observed);
            for (kernel, us) in means_alone(&observed) {
                m.steps.add(&observed.program.kernels[kernel.index()], us);
            }
        } else {
            between.add_events(&observed);
            new_kernels(&observed, &mut m.steps);
        }
    }
    between.settle(&mut m.steps);
    if let Some(launch) = Some(middle(&mut hosts)).filter(|l| l.is_finite()) {
        m.host.launch_us = launch.max(0.1);
    }
    Ok(())
}

/// Microseconds of a launch, the interpreter's part included: what a step's issue takes beyond events and allocations.
fn host_cost(observed: &Observed, host: &host::Host) -> Option<f64> {
    let program = &observed.program;
    let section = program.section(SectionKind::Steady)?;
    let count = |f: fn(&Op) -> bool| {
        let all = program.section_instrs(section).iter();
        all.filter(|i| f(&i.op)).count() as f64
    };
    let launches = count(|o| matches!(o, Op::Launch { .. }));
    let others = count(|o| matches!(o, Op::Record { .. } | Op::Wait { .. })) * host.event_us
        + count(|o| matches!(o, Op::Alloc(_) | Op::Free(_))) * host.alloc_us
        + count(|o| matches!(o, Op::Collective { .. } | Op::Copy { .. })) * host.copy_us;
    let mut all: Vec<f64> = observed.plain.iter().map(|p| p.1).collect();
    let whole = middle(&mut all);
    (launches > 0.0 && whole.is_finite()).then(|| (whole - others) / launches)
}

/// Adds the kernels that ran on several ranks only. With several GPUs in one process times come from events, which
/// lengthen what they measure: by as much as they lengthen what was measured without.
fn new_kernels(observed: &Observed, steps: &mut Totals) {
    let (mut longer, mut new) = (Vec::new(), Vec::new());
    for (kernel, us) in means_alone(observed) {
        let kernel = &observed.program.kernels[kernel.index()];
        match steps.find(kernel) {
            Some(alone) if alone < SHORT_US => longer.push(us - alone),
            Some(_) => {}
            None => new.push((kernel, us)),
        }
    }
    let longer = Some(middle(&mut longer))
        .filter(|l| *l > 0.0)
        .unwrap_or(0.0);
    for (kernel, us) in new {
        steps.add(kernel, (us - longer).max(steps.shortest_us));
    }
}

/// The middle one; not a number of none.
fn middle(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communicators_are_told_from_the_context() {
        // 800 and 500 a communicator.
        assert_eq!(apart(&[(1, 1300), (2, 1800)]), (800, 500));
        assert_eq!(apart(&[(0, 900), (0, 900)]), (900, 0));
        assert_eq!(apart(&[]), (0, 0));
    }
}
