//! Synthetic runs for tests and benchmarks. Every field has a value, and nothing is random.

use crate::view::{
    Alive, InstrView, ProgramView, RunView, ScenarioView, VIEW_FORMAT, Validation, Work,
};
use shardlab_plan::ir::{CollectiveKind, DType, InstrId, Role, StreamId, UnitId};
use shardlab_plan::program::{Phase, SectionKind};
use shardlab_plan::record::{
    Blocker, Cause, CollectiveStats, CostSources, ExposedGap, MemoryReport, MemorySample, PeakAt,
    Run, RunKind, Span, StepRecord,
};
use shardlab_plan::units::{Bytes, Picos};
use std::collections::BTreeMap;

const US: u64 = 1_000_000;
const UNITS: u32 = 32;

/// Returns a run of about `spans` spans on three streams. Each unit has eight kernels, a gather and
/// a reduction, with a wait.
#[must_use]
pub fn view(spans: u32) -> RunView {
    let mut made = Made::default();
    for i in 0..spans {
        made.span(i, spans);
    }
    let to = made.clock;
    let mut run = run(made.spans, to);
    run.memory.timeline = made.memory;
    run.gaps = made.gaps;
    let exposed: Picos = run.gaps.iter().map(|g| g.end - g.start).sum();
    run.exposed = BTreeMap::from([(Cause::Wire, exposed)]);
    let instrs = made.instrs;
    RunView {
        format: VIEW_FORMAT,
        scenario: scenario(),
        program: program(&instrs),
        instrs,
        names: [
            "mm",
            "all_gather",
            "reduce_scatter",
            "model",
            "alloc",
            "free",
        ]
        .map(str::to_owned)
        .to_vec(),
        alive: vec![Alive {
            name: "activation layers.0#1".into(),
            role: Role::Activation,
            unit: "layers.0".into(),
            dtype: DType::Bf16,
            bytes: Bytes(1 << 20),
            count: 3,
        }],
        validations: vec![Validation {
            steps: 2,
            loss: 3.25,
        }],
        interrupted: false,
        experts: None,
        run,
    }
}

#[derive(Default)]
struct Made {
    clock: Picos,
    spans: Vec<Span>,
    instrs: Vec<InstrView>,
    memory: Vec<MemorySample>,
    gaps: Vec<ExposedGap>,
}

impl Made {
    fn span(&mut self, i: u32, all: u32) {
        let unit = UnitId((i / 10 % UNITS) as u16);
        let backward = i >= all / 2;
        let (name, work, stream) = match i % 10 {
            0 => (1, Work::AllGather, 1),
            9 => (2, Work::ReduceScatter, 2),
            _ => (0, Work::Gemm, 0),
        };
        let length = Picos(US * u64::from(3 + i % 7));
        let start = self.clock;
        if stream == 0 {
            self.clock += length;
        }
        let id = InstrId(3 * i);
        let instr = InstrView {
            id,
            name,
            rule: 3,
            work: Some(work),
            role: None,
            unit,
            phase: if backward {
                Phase::Backward
            } else {
                Phase::Forward
            },
            micro_batch: 0,
            stream: StreamId(stream),
            bytes: 1 << 20,
            flops: 1 << 30,
        };
        self.instrs.push(instr);
        let index = self.spans.len() as u32;
        self.spans.push(Span {
            instr: id,
            stream: StreamId(stream),
            issued: start,
            ready: start,
            start,
            end: start + length,
            alone: length,
            blocker: index.checked_sub(1).map_or(Blocker::None, Blocker::Event),
        });
        if i.is_multiple_of(10) {
            self.gaps.push(ExposedGap {
                start,
                end: start + Picos(US),
                cause: Cause::Wire,
                waited_for: Some(index),
            });
            self.clock += Picos(US);
        }
        if i.is_multiple_of(4) {
            let alloc = i.is_multiple_of(8);
            self.instrs.push(InstrView {
                id: InstrId(3 * i + 1),
                name: if alloc { 4 } else { 5 },
                work: None,
                role: Some(Role::Activation),
                flops: 0,
                ..instr
            });
            self.memory.push(MemorySample {
                instr: InstrId(3 * i + 1),
                time: start,
                allocated: Bytes(if alloc { 2 << 20 } else { 1 << 20 }),
                reserved: Bytes(4 << 20),
            });
        }
    }
}

fn scenario() -> ScenarioView {
    let settings = BTreeMap::from(
        [
            ("fsdp.policy", "native"),
            ("fsdp.prefetch_forward", "1"),
            ("mesh.dp_shard", "4"),
        ]
        .map(|(k, v)| (k.to_owned(), v.to_owned())),
    );
    ScenarioView {
        name: "synthetic".into(),
        about: "Made for tests.".into(),
        source: "synthetic".into(),
        text: "[model]\npreset = \"none\"\n".into(),
        overrides: vec!["fsdp.prefetch_forward=1".into()],
        settings,
        digest: "00112233aabbccdd".into(),
    }
}

fn program(instrs: &[InstrView]) -> ProgramView {
    let counts = BTreeMap::from([("launch".to_owned(), instrs.len() as u32)]);
    ProgramView {
        digest: "0123456789abcdef".into(),
        units: (0..UNITS).map(|i| format!("layers.{i}")).collect(),
        streams: ["compute", "all_gather", "reduce_scatter"]
            .map(str::to_owned)
            .to_vec(),
        counts: BTreeMap::from([(SectionKind::Steady, counts)]),
        parameters: 1 << 20,
        parameter_count: None,
        dp_shard: 4,
        dp_outer: 1,
        micro_batches: 1,
        model_flops: 1 << 40,
    }
}

fn run(spans: Vec<Span>, to: Picos) -> Run {
    Run {
        scenario: "synthetic".into(),
        program_digest: "0123456789abcdef".into(),
        kind: RunKind::Sim,
        world_size: 4,
        policy: "native".into(),
        hardware: "h200-nvlink".into(),
        steps: vec![StepRecord {
            step: 1,
            section: SectionKind::Steady,
            start: Picos::ZERO,
            end: to,
            host: Picos(US),
            peak_allocated: Bytes(2 << 20),
            peak_reserved: Bytes(4 << 20),
        }],
        step_samples: vec![to, to + Picos(US), to + Picos(2 * US)],
        spans,
        recorded_from: Picos::ZERO,
        recorded_to: to,
        memory: MemoryReport {
            peak_allocated: Bytes(2 << 20),
            peak_reserved: Bytes(4 << 20),
            peak_device: Bytes(8 << 20),
            persistent: Bytes(1 << 20),
            capacity: Some(Bytes(1 << 30)),
            at: PeakAt {
                step: 1,
                instr: InstrId(1),
                time: Picos(US),
                phase: Phase::Forward,
                unit: UnitId(0),
                micro_batch: 0,
            },
            by_role: vec![(Role::Activation, Bytes(2 << 20))],
            by_unit: vec![("layers.0".into(), Bytes(2 << 20))],
            retries: 0,
            timeline: Vec::new(),
        },
        collectives: BTreeMap::from([(
            CollectiveKind::AllGather,
            CollectiveStats {
                count: 1,
                bytes: Bytes(1 << 20),
                busy: Picos(US),
                exposed: Picos(US),
                overlapped_with_gemm: 1,
            },
        )]),
        gaps: Vec::new(),
        exposed: BTreeMap::new(),
        host: Picos(US),
        tokens: 8192,
        mfu: 0.4,
        costs: CostSources {
            measured: Picos(US),
            modelled: Picos(US),
            modelled_by_name: vec![("mm".into(), Picos(US))],
        },
        losses: vec![4.5, f64::NAN, 4.25],
        grad_norms: vec![1.5, f64::INFINITY, 0.1],
        basis: None,
        other: None,
        environment: BTreeMap::from([("seed".to_owned(), "0".to_owned())]),
    }
}
