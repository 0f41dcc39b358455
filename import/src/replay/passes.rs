//! Forward and backward of a trace as operations of a tape.

use super::lives::Lives;
use super::modules::Units;
use crate::RunImport;
use crate::measured::{IMPORTED, Instr};
use shardlab_plan::compile::tape::TapeOp;
use shardlab_plan::ir::{
    COMPUTE, DType, HostWorkKind, Kernel, KernelClass, KernelId, ModuleId, Operand, ParamId,
    Source, Storage,
};
use shardlab_plan::program::Phase;
use shardlab_plan::record::Work;
use shardlab_plan::units::{Bytes, Flops, Picos};
use std::collections::BTreeMap;

/// The passes of a tape, with what they refer to.
#[derive(Default)]
pub(super) struct Passes {
    pub(super) storages: Vec<Storage>,
    pub(super) kernels: Vec<Kernel>,
    pub(super) times: Vec<Picos>,
    pub(super) operands: Vec<Operand>,
    pub(super) forward: Vec<TapeOp>,
    pub(super) backward: Vec<TapeOp>,
    /// Whether the compiler generated the unit's code.
    compiled: bool,
}

/// A measured kernel.
#[derive(Clone, Copy)]
struct Measured<'a> {
    instr: &'a Instr,
    name: &'a str,
    /// Host time of its launch.
    issued: Picos,
    time: Picos,
}

/// Consecutive kernels of a module.
struct Run<'a> {
    module: ModuleId,
    recompute: bool,
    kernels: Vec<Measured<'a>>,
}

pub(super) fn build(run: &RunImport, units: &Units) -> Result<Passes, String> {
    let m = &run.measured;
    let by_id: BTreeMap<_, &Instr> = m.instrs.iter().map(|i| (i.id, i)).collect();
    let mut kernels: Vec<Measured<'_>> = m
        .run
        .spans
        .iter()
        .filter_map(|span| {
            let instr = *by_id.get(&span.instr)?;
            // The engine's own kernels have a rule, and collectives have their own stream.
            let own = instr.rule == IMPORTED && instr.stream == COMPUTE && instr.micro_batch == 0;
            let kind = instr.work.is_some_and(|w| !w.is_collective());
            (own && kind).then_some(Measured {
                instr,
                name: &m.names[instr.name as usize],
                issued: span.issued,
                time: span.end - span.start,
            })
        })
        .collect();
    kernels.sort_by_key(|k| k.instr.id);
    let mode = run.facts.compiled.as_ref();
    let mut passes = Passes {
        compiled: mode.is_some_and(|c| c.value != crate::facts::Compiled::Off),
        ..Passes::default()
    };
    let of = |phases: &[Phase]| {
        let chosen = kernels.iter().filter(|k| phases.contains(&k.instr.phase));
        runs(chosen.copied(), |k| module_of(k, units, m.loss))
    };
    let mut forward = of(&[Phase::Forward]);
    let mut backward = of(&[Phase::Backward, Phase::Recompute]);
    // The loss is outside of the root: it comes after the root in forward and before it in
    // backward.
    let is_loss = |run: &Run<'_>| Some(run.module) == units.loss;
    forward.sort_by_key(is_loss);
    backward.sort_by_key(|run| !is_loss(run));
    if forward.is_empty() || backward.is_empty() {
        return Err("the trace shows no kernels of forward and backward passes (CUDA graphs launch them as a whole)".into());
    }
    let compute = run.facts.compute.as_ref().map_or("bf16", |c| c.value);
    let compute = DType::ALL.into_iter().find(|t| t.name() == compute);
    let element = compute.unwrap_or(DType::Bf16).size();
    let visit = |module: ModuleId| Visit {
        params: &units.owned[module.index()],
        sizes: &units.params,
        element,
    };
    let all = forward.iter().chain(&backward).flat_map(|r| &r.kernels);
    let issued = all.map(|k| k.issued);
    let (mut lives, storages) = Lives::new(&m.activations, units, element, issued);
    passes.storages = storages;
    passes.forward(&forward, units, &visit, &mut lives);
    passes.backward(&backward, units, &visit, &mut lives);
    Ok(passes)
}

/// Returns the module of a kernel. `loss` are the times between which the root's kernels are those
/// of the loss.
fn module_of(kernel: &Measured<'_>, units: &Units, loss: Option<[Picos; 2]>) -> ModuleId {
    let module = units.module(u32::from(kernel.instr.unit.0));
    let outside = loss.is_some_and(|[left, entered]| (left..entered).contains(&kernel.issued));
    match units.loss {
        Some(loss) if outside && module == ModuleId(0) => loss,
        _ => module,
    }
}

/// Splits kernels into runs of one module each. A module other than the root has one run per pass,
/// which later kernels join.
fn runs<'a>(
    kernels: impl Iterator<Item = Measured<'a>>,
    module_of: impl Fn(&Measured<'_>) -> ModuleId,
) -> Vec<Run<'a>> {
    let mut all: Vec<Run<'a>> = Vec::new();
    for kernel in kernels {
        let module = module_of(&kernel);
        let recompute = kernel.instr.phase == Phase::Recompute;
        let fits = |run: &Run<'_>| run.module == module && run.recompute == recompute;
        let known = match module {
            ModuleId(0) => all.last_mut().filter(|run| fits(run)),
            _ => all.iter_mut().find(|run| fits(run)),
        };
        match known {
            Some(run) => run.kernels.push(kernel),
            None => all.push(Run {
                module,
                recompute,
                kernels: vec![kernel],
            }),
        }
    }
    all
}

/// What a run of a module refers to.
struct Visit<'a> {
    params: &'a [ParamId],
    sizes: &'a [shardlab_plan::ir::Param],
    /// Size in bytes of an element of the compute type.
    element: u64,
}

impl Visit<'_> {
    /// Returns the whole parameter or gradient as an operand.
    fn operand(&self, source: impl Fn(ParamId) -> Source, p: ParamId) -> Operand {
        Operand {
            source: source(p),
            offset: 0,
            bytes: self.sizes[p.index()].numel() * self.element,
        }
    }
}

impl Passes {
    fn forward<'a>(
        &mut self,
        runs: &[Run<'_>],
        units: &Units,
        visit: &impl Fn(ModuleId) -> Visit<'a>,
        lives: &mut Lives,
    ) {
        let mut ops = vec![TapeOp::Enter(ModuleId(0))];
        for run in runs {
            if Some(run.module) == units.loss {
                ops.push(TapeOp::Exit(ModuleId(0)));
            }
            let inner = run.module != ModuleId(0);
            if inner {
                ops.push(TapeOp::Enter(run.module));
            }
            self.launches(run, &visit(run.module), &[], lives, &mut ops);
            if inner {
                ops.push(TapeOp::Exit(run.module));
            }
        }
        if runs.last().map(|r| r.module) != units.loss {
            ops.push(TapeOp::Exit(ModuleId(0)));
        }
        self.forward = ops;
    }

    fn backward<'a>(
        &mut self,
        runs: &[Run<'_>],
        units: &Units,
        visit: &impl Fn(ModuleId) -> Visit<'a>,
        lives: &mut Lives,
    ) {
        let owned = &units.owned;
        let last_of_root = runs.iter().rposition(|r| r.module == ModuleId(0));
        let mut ops = Vec::new();
        let mut in_root = false;
        let mut seen = vec![false; owned.len()];
        for (i, run) in runs.iter().enumerate() {
            if !in_root && Some(run.module) != units.loss {
                ops.push(TapeOp::Enter(ModuleId(0)));
                in_root = true;
            }
            let v = visit(run.module);
            if run.recompute {
                ops.push(TapeOp::EnterRecompute(run.module));
                self.launches(run, &v, &[], lives, &mut ops);
                ops.push(TapeOp::ExitRecompute(run.module));
                continue;
            }
            let inner = run.module != ModuleId(0);
            // The root's gradients are complete with its last kernels.
            let grads: &[ParamId] = match inner || Some(i) == last_of_root {
                true => v.params,
                false => &[],
            };
            if inner {
                ops.push(TapeOp::Enter(run.module));
            }
            self.launches(run, &v, grads, lives, &mut ops);
            ops.extend(grads.iter().map(|p| TapeOp::GradReady(*p)));
            seen[run.module.index()] |= !grads.is_empty();
            if inner {
                ops.push(TapeOp::Exit(run.module));
            }
        }
        if !in_root {
            ops.push(TapeOp::Enter(ModuleId(0)));
        }
        // The gradients of units without a kernel in backward are zero, and complete at the end of
        // backward.
        for (module, params) in owned.iter().enumerate().filter(|(m, _)| !seen[*m]) {
            let inner = module != 0 && !params.is_empty();
            let id = ModuleId(module as u32);
            if inner {
                ops.push(TapeOp::Enter(id));
            }
            ops.extend(params.iter().map(|p| TapeOp::GradReady(*p)));
            if inner {
                ops.push(TapeOp::Exit(id));
            }
        }
        ops.extend(lives.rest());
        ops.push(TapeOp::Exit(ModuleId(0)));
        self.backward = ops;
    }

    /// Adds the kernels of a run. All of them read the module's parameters. The writes of gradients
    /// are divided equally among the kernels, starting with the last parameter, because backward
    /// produces its gradient first.
    fn launches(
        &mut self,
        run: &Run<'_>,
        v: &Visit<'_>,
        grads: &[ParamId],
        lives: &mut Lives,
        ops: &mut Vec<TapeOp>,
    ) {
        let backward = run.kernels.iter().any(|k| k.instr.phase == Phase::Backward);
        // Units without a generated kernel, such as an embedding or the head, were not compiled.
        let generated = |k: &Measured<'_>| k.name.starts_with("triton_");
        let compiled = self.compiled && run.kernels.iter().any(generated);
        let kind = match (compiled, backward) {
            (false, false) => HostWorkKind::Dispatch,
            (false, true) => HostWorkKind::AutogradDispatch,
            (true, _) => HostWorkKind::Guard,
        };
        let n = run.kernels.len();
        let mut written = 0;
        for (i, kernel) in run.kernels.iter().enumerate() {
            ops.extend(lives.before_next());
            if !compiled || i == 0 {
                ops.push(TapeOp::Host { kind, count: 1 });
            }
            if compiled {
                let kind = HostWorkKind::CompiledKernel;
                ops.push(TapeOp::Host { kind, count: 1 });
            }
            let reads = self.operands.len() as u32;
            for &p in v.params {
                self.operands.push(v.operand(Source::Param, p));
            }
            let writes = self.operands.len() as u32;
            let due = grads.len() * (i + 1) / n;
            for &p in grads.iter().rev().take(due).skip(written) {
                self.operands.push(v.operand(Source::Grad, p));
            }
            written = due;
            let id = self.kernel(kernel);
            ops.push(TapeOp::Launch {
                kernel: id,
                reads,
                writes,
                end: self.operands.len() as u32,
            });
        }
    }

    fn kernel(&mut self, measured: &Measured<'_>) -> KernelId {
        let class = match measured.instr.work {
            Some(Work::Gemm) => KernelClass::Gemm {
                m: 1,
                n: 1,
                k: 1,
                batch: 1,
            },
            Some(Work::Copy) => KernelClass::Copy,
            _ => KernelClass::Pointwise,
        };
        self.kernels.push(Kernel {
            name: measured.name.to_owned(),
            class,
            // The times are known, so neither FLOPs nor traffic determine the cost.
            flops: Flops(0),
            read: Bytes::ZERO,
            written: Bytes::ZERO,
            dtype: DType::Bf16,
            body: Vec::new(),
            used_rows: None,
        });
        self.times.push(measured.time);
        KernelId((self.kernels.len() - 1) as u32)
    }
}
