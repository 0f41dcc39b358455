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
mod wires;

use super::Options;
use super::steps::{Between, Observed, On, Totals, means, run};
use crate::device::cuda::{Context, CudaFactory, CudaOptions};
use crate::train::TrainError;
use bench::Bench;
use shardlab_plan::program::{Op, SectionKind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

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
    /// Bytes on the device beside the engine's: with one rank, and for each communicator.
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
    said("matrix products, attention, host");
    let one = Bench::new(&factory, 1);
    grid::measure(&one, &mut m).map_err(fault)?;
    host::measure(&one, &mut m.host).map_err(fault)?;
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
    said("done");
    Ok(render::profile(&options.name, &m))
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
        let observed = run(&on, &model, variant, policy, world, Duration::ZERO)?;
        if world == 1 {
            between.add(&observed);
            hosts.extend(host_cost(&observed, &m.host));
            m.context_bytes = m.context_bytes.max(observed.foreign.unwrap_or(0));
        } else {
            between.add_events(&observed);
            let communicators = observed.program.communicators.len().max(1) as u64;
            let more = observed
                .foreign
                .unwrap_or(0)
                .saturating_sub(m.context_bytes);
            m.communicator_bytes = m.communicator_bytes.max(more / communicators);
        }
        for (kernel, us) in means(&observed) {
            let kernel = &observed.program.kernels[kernel.index()];
            if world == 1 || m.steps.find(kernel).is_none() {
                m.steps.add(kernel, us);
            }
        }
        if world == 1 {
            // With several GPUs in one process times come from events, which lengthen what they measure.
            tail(&observed, &mut m.host.tails);
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

/// What a step takes beyond its kernels and the gaps between them.
fn tail(observed: &Observed, tails: &mut Vec<f64>) {
    let spans = &observed.typical.spans;
    let (Some(first), Some(last)) = (
        spans.iter().map(|s| s.start.0).min(),
        spans.iter().map(|s| s.end.0).max(),
    ) else {
        return;
    };
    let mut whole: Vec<f64> = observed.plain.iter().map(|p| p.0).collect();
    let rest = middle(&mut whole) - super::steps::us(last - first);
    if rest.is_finite() {
        tails.push(rest.clamp(0.0, 200.0));
    }
}

/// The middle one; not a number of none.
fn middle(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
