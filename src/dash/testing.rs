//! Runs and dashboards for tests.

use super::app::{App, Tone};
use super::draw::draw;
use super::event::{Effect, Event, Message, News, Setup};
use super::glance::{Brief, Glance};
use super::lanes::Lanes;
use super::options;
use super::scenarios::Source;
use super::state::Saved;
use super::tables::Table;
use super::theme::{Depth, Name, Theme};
use super::update::update;
use super::whatif::{Explained, Group, Proposal};
use crate::analysis::whatif::Effect as WhatIfEffect;
use crate::predict::{Fit, Profiles, predict};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use shardlab_plan::ir::{InstrId, Role, StreamId, UnitId};
use shardlab_plan::program::Phase;
use shardlab_plan::record::{
    Basis, BasisKind, Blocker, Cause, ErrorBand, ExposedGap, MemorySample, RunKind, Span,
};
use shardlab_plan::scenario::{self, BatchUnit};
use shardlab_plan::units::{Bytes, Picos};
use shardlab_reports::RunView;
use shardlab_reports::view::{InstrView, Work};
use shardlab_sim::Options;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Returns the predicted run of a shipped scenario.
pub(crate) fn view(name: &str, set: &[&str]) -> Arc<RunView> {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    let scenario = scenario::load(Path::new(name), &set).unwrap();
    let p = predict(&scenario, &Profiles::default(), &Options::default()).unwrap();
    let mut view = RunView::of(p.run, &p.program, &p.scenario);
    view.scenario.overrides = set;
    Arc::new(view)
}

const US: u64 = 1_000_000;
const MIB: u64 = 1 << 20;

/// Returns a synthetic step that does not depend on the simulator: four layers forward and
/// backward, gathers one unit ahead, reductions, and an optimizer. `slow` (percent) stretches every
/// kernel.
pub(crate) fn step(kind: RunKind, slow: u64) -> Arc<RunView> {
    let mut made = Made {
        slow,
        ..Made::default()
    };
    for unit in 1..5 {
        made.unit(unit, Phase::Forward);
    }
    for unit in (1..5).rev() {
        made.unit(unit, Phase::Backward);
    }
    let wait = made.reduced;
    made.kernel(3, Work::Optimizer, 0, Phase::Optimizer, 400, Some(wait));
    let mut view = shardlab_reports::testing::view(1);
    let run = &mut view.run;
    run.kind = kind;
    run.scenario = "llama-tiny".into();
    run.recorded_to = Picos(made.compute);
    run.step_samples = vec![Picos(made.compute); 3];
    run.exposed = BTreeMap::new();
    for gap in &made.gaps {
        *run.exposed.entry(gap.cause).or_default() += gap.end - gap.start;
    }
    run.gaps = made.gaps;
    run.spans = made.spans;
    run.memory.timeline = made.samples;
    let peak = run
        .memory
        .timeline
        .iter()
        .max_by_key(|s| s.allocated)
        .copied()
        .unwrap();
    run.memory.at.instr = peak.instr;
    run.memory.peak_allocated = peak.allocated;
    run.memory.peak_reserved = Bytes(900 * MIB);
    run.memory.peak_device = Bytes(1400 * MIB);
    run.memory.by_role = vec![
        (Role::Activation, Bytes(peak.allocated.0 - 350 * MIB)),
        (Role::OptimizerState, Bytes(200 * MIB)),
        (Role::FullWeight, Bytes(50 * MIB)),
        (Role::MainWeight, Bytes(100 * MIB)),
    ];
    run.losses = match kind {
        RunKind::Sim => Vec::new(),
        RunKind::Exec | RunKind::Import => (0..20).map(|i| 5.0 / f64::from(i + 1) + 1.0).collect(),
    };
    view.scenario.name = "llama-tiny".into();
    view.scenario.overrides = Vec::new();
    view.program.units = std::iter::once("root".to_owned())
        .chain((0..4).map(|i| format!("layers.{i}")))
        .collect();
    view.program.streams = ["compute", "all_gather", "reduce_scatter"]
        .map(str::to_owned)
        .to_vec();
    view.instrs = made.instrs;
    view.names = NAMES.map(str::to_owned).to_vec();
    Arc::new(view)
}

const NAMES: [&str; 9] = [
    "mm",
    "all_gather",
    "reduce_scatter",
    "adamw",
    "attention",
    "rms_norm",
    "alloc",
    "free",
    "model",
];

#[derive(Default)]
struct Made {
    slow: u64,
    compute: u64,
    gather: u64,
    reduce: u64,
    reduced: u32,
    spans: Vec<Span>,
    instrs: Vec<InstrView>,
    samples: Vec<MemorySample>,
    gaps: Vec<ExposedGap>,
    allocated: u64,
}

impl Made {
    fn unit(&mut self, unit: u16, phase: Phase) {
        let us = if phase == Phase::Forward { 1 } else { 2 };
        self.memory(unit, phase, Role::FullWeight, 50);
        let gathered = self.collective(1, Work::AllGather, unit, phase, 1, 420, None);
        let waits = self.kernel(5, Work::Memory, unit, phase, 60 * us, Some(gathered));
        self.kernel(0, Work::Gemm, unit, phase, 300 * us, None);
        self.kernel(4, Work::Attention, unit, phase, 200 * us, None);
        let last = self.kernel(0, Work::Gemm, unit, phase, 260 * us, None);
        let _ = waits;
        if phase == Phase::Forward {
            self.memory(unit, phase, Role::Activation, 80);
        } else {
            self.reduced = self.collective(2, Work::ReduceScatter, unit, phase, 2, 700, Some(last));
            self.memory(unit, phase, Role::Activation, -80);
        }
        self.memory(unit, phase, Role::FullWeight, -50);
    }

    fn instr(
        &mut self,
        name: u32,
        work: Option<Work>,
        unit: u16,
        phase: Phase,
        stream: u8,
    ) -> InstrId {
        let id = InstrId(self.instrs.len() as u32);
        self.instrs.push(InstrView {
            id,
            name,
            rule: 8,
            work,
            role: None,
            unit: UnitId(unit),
            phase,
            micro_batch: 0,
            stream: StreamId(stream),
            bytes: 32 * MIB,
            flops: if work == Some(Work::Gemm) { 1 << 36 } else { 0 },
        });
        id
    }

    fn span(
        &mut self,
        instr: InstrId,
        stream: u8,
        ready: u64,
        start: u64,
        us: u64,
        blocker: Blocker,
    ) -> u32 {
        let end = start + us * US * (100 + self.slow) / 100;
        self.spans.push(Span {
            instr,
            stream: StreamId(stream),
            issued: Picos(start / 2),
            ready: Picos(ready),
            start: Picos(start),
            end: Picos(end),
            alone: Picos(end - start),
            blocker,
        });
        self.spans.len() as u32 - 1
    }

    fn kernel(
        &mut self,
        name: u32,
        work: Work,
        unit: u16,
        phase: Phase,
        us: u64,
        after: Option<u32>,
    ) -> u32 {
        let instr = self.instr(name, Some(work), unit, phase, 0);
        let ready = after.map_or(0, |a| self.spans[a as usize].end.0);
        let start = self.compute.max(ready);
        let before = self.spans.iter().rposition(|s| s.stream.0 == 0);
        let blocker = match (after, before) {
            (Some(a), _) if ready > self.compute => Blocker::Event(a),
            (_, Some(b)) => Blocker::Stream(b as u32),
            _ => Blocker::Host,
        };
        if start > self.compute {
            let last = phase == Phase::Optimizer;
            self.gaps.push(ExposedGap {
                start: Picos(self.compute),
                end: Picos(start),
                cause: if last { Cause::Tail } else { Cause::Wire },
                waited_for: after,
            });
        }
        let span = self.span(instr, 0, ready, start, us, blocker);
        self.compute = self.spans[span as usize].end.0;
        span
    }

    #[expect(clippy::too_many_arguments, reason = "a table in tests")]
    fn collective(
        &mut self,
        name: u32,
        work: Work,
        unit: u16,
        phase: Phase,
        stream: u8,
        us: u64,
        after: Option<u32>,
    ) -> u32 {
        let instr = self.instr(name, Some(work), unit, phase, stream);
        let ready = after.map_or(0, |a| self.spans[a as usize].end.0);
        let clock = if stream == 1 {
            self.gather
        } else {
            self.reduce
        };
        let start = clock.max(ready);
        let blocker = after.map_or(Blocker::Host, Blocker::Event);
        let span = self.span(instr, stream, ready, start, us, blocker);
        let end = self.spans[span as usize].end.0;
        if stream == 1 {
            self.gather = end;
        } else {
            self.reduce = end;
        }
        span
    }

    fn memory(&mut self, unit: u16, phase: Phase, role: Role, mib: i64) {
        let name = if mib > 0 { 6 } else { 7 };
        let instr = self.instr(name, None, unit, phase, 0);
        if let Some(last) = self.instrs.last_mut() {
            last.role = Some(role);
        }
        if self.allocated == 0 {
            self.allocated = 300 * MIB;
        }
        self.allocated = self.allocated.checked_add_signed(mib * MIB as i64).unwrap();
        self.samples.push(MemorySample {
            instr,
            time: Picos(self.compute),
            allocated: Bytes(self.allocated),
            reserved: Bytes(700 * MIB),
        });
    }
}

/// Returns synthetic numbers that do not depend on the simulator.
pub(crate) fn brief(step_ms: f64, gib: f64, fits: &'static str) -> Brief {
    let bytes = |x: f64| Bytes((x * (1u64 << 30) as f64) as u64);
    Brief {
        step_ms,
        tokens_per_s: 8.192e6 / step_ms,
        counted_in: BatchUnit::Tokens,
        mfu: 0.42,
        exposed_ms: step_ms / 20.0,
        host_ms: step_ms / 4.0,
        allocated: bytes(gib),
        reserved: bytes(gib * 1.05),
        device: bytes(gib * 1.1),
        capacity: Some(bytes(140.4)),
        fits,
        policy: "native".into(),
        world: 4,
        hardware: "h200-nvlink".into(),
        basis: Some(Arc::new(Basis {
            kind: BasisKind::Measured,
            on: "4 x NVIDIA H200".into(),
            band: Some(ErrorBand {
                step_percent: Some(5.8),
                reserved_percent: Some(1.2),
                rows: 72,
                projects: 2,
                like: "same hardware".into(),
            }),
        })),
    }
}

/// Returns a prediction with the options of a shipped scenario and synthetic numbers.
pub(crate) fn glance(name: &str, set: &[&str], step_ms: f64) -> Arc<Glance> {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    let scenario = scenario::load(Path::new(name), &set).unwrap();
    Arc::new(Glance {
        brief: brief(step_ms, 52.0, "yes"),
        exposed: vec![(Cause::Tail, 11.28), (Cause::Wire, 5.8), (Cause::Host, 0.003)],
        roles: vec![
            (Role::OptimizerState, Bytes(15 << 30)),
            (Role::MainWeight, Bytes(8 << 30)),
            (Role::Activation, Bytes(20 << 30)),
            (Role::FullWeight, Bytes(2 << 30)),
        ],
        peak: "backward of root".into(),
        experts: Vec::new(),
        why: vec![
            "Bound by computation: the compute stream is busy 98 % of the step (gemm 70 %, attention 12 %).".into(),
            "Exposed: 11.28 ms of reduce_scatter in backward because nothing is left to compute.".into(),
        ],
        values: options::values(&scenario),
        digest: "0123456789abcdef".into(),
    })
}

/// Returns synthetic changes to the selected scenario.
pub(crate) fn explained(stage: &Stage) -> Explained {
    let gib = |x: f64| Bytes((x * f64::from(1 << 30)) as u64);
    let effect = |step_ms: f64, reserved: f64, fit: Fit| WhatIfEffect {
        step_ms,
        tokens_per_s: 8_192_000.0 / step_ms,
        counted_in: BatchUnit::Tokens,
        peak_allocated: gib(reserved - 2.0),
        peak_reserved: gib(reserved),
        peak_device: gib(reserved + 1.0),
        host_state: Bytes(0),
        free_bytes: Some(gib(139.0 - reserved).0.cast_signed()),
        has_headroom: true,
        fit,
        shortage: None,
    };
    let proposal = |group, set: &str, outcome| Proposal {
        group,
        label: set.to_owned(),
        overrides: set.split(' ').map(str::to_owned).collect(),
        outcome,
    };
    let ok = |step_ms, reserved| Ok(effect(step_ms, reserved, Fit::Fits));
    let reason = "fsdp.copy_engine_all_gather needs NVLink between all GPUs of the mesh";
    let mut table = Table::new(
        "Exposed time: 17.08 ms (1.6 %)",
        &["cause", "waited for", ">ms"],
    );
    for (cause, name, ms) in [
        ("tail", "reduce_scatter", "11.28"),
        ("wire", "all_gather", "5.80"),
    ] {
        table.row(Tone::Plain, [cause, name, ms].map(str::to_owned));
    }
    Explained {
        setup: stage.app.setup().unwrap(),
        verdict: (
            Tone::Good,
            "fits with 82.00 GiB free; 1,076.70 ms per step, measured ± 5.8 %".into(),
        ),
        why: "bound by computation: the compute stream is busy 98 % of the step".into(),
        warnings: vec!["model.vocab=128257 is not a multiple of 8".into()],
        base: effect(1076.7, 57.0, Fit::Fits),
        basis: None,
        proposals: vec![
            proposal(Group::Faster, "compile.mode=blocks", ok(951.2, 57.0)),
            proposal(Group::Faster, "fsdp.prefetch_forward=2", ok(1060.1, 58.5)),
            proposal(
                Group::Smaller,
                "train.recompute=full train.recompute_layers=16",
                ok(1240.5, 31.25),
            ),
            proposal(
                Group::OtherTraining,
                "train.micro_batch=4",
                Ok(effect(
                    2101.0,
                    120.0,
                    Fit::Exceeds {
                        over: gib(3.0),
                        out_of_memory: None,
                    },
                )),
            ),
            proposal(Group::NoGain, "fsdp.prefetch_forward=0", ok(1101.5, 56.5)),
            proposal(
                Group::Impossible,
                "fsdp.copy_engine_all_gather=true",
                Err(reason.to_owned()),
            ),
        ],
        tables: vec![table],
    }
}

/// Returns synthetic best settings of the selected scenario.
pub(crate) fn tuned(stage: &Stage) -> Explained {
    let mut found = explained(stage);
    let groups = [Group::Best, Group::Simplest, Group::Front];
    found.proposals.truncate(groups.len());
    for (proposal, group) in found.proposals.iter_mut().zip(groups) {
        proposal.group = group;
    }
    let (tone, verdict) = found.verdict;
    found.verdict = (tone, format!("best: {verdict}"));
    found.warnings.clear();
    let mut changes = Table::new(
        "Changes, and what undoing each one alone would cost",
        &["option", "today", "best", ">share", "effect"],
    );
    let row = [
        "compile.mode",
        "off",
        "blocks",
        "100 %",
        "125.5 ms less computation",
    ];
    changes.row(Tone::Plain, row.map(str::to_owned));
    changes.notes = vec![
        "412 of 3e6 combinations were predicted. No step within the limits is shorter than 920.00 ms (bound): gap 3.4 %."
            .to_owned(),
    ];
    found.tables = vec![changes];
    found
}

/// A dashboard without the outside: effects are collected, and tests send the messages.
pub(crate) struct Stage {
    pub(crate) app: App,
    pub(crate) effects: Vec<Effect>,
}

impl Stage {
    /// Creates a dashboard over a few shipped scenarios with synthetic predictions.
    pub(crate) fn new() -> Self {
        Self::with(&Saved::default())
    }

    pub(crate) fn with(saved: &Saved) -> Self {
        let names = [
            ("llama-tiny", "A tiny llama that trains on a laptop."),
            ("llama3-70b-64xh100", "Llama 3 70B on eight nodes."),
            ("llama3-8b-4xh200", "Llama 3 8B on four H200."),
            ("prefetch-0", "No prefetch."),
            ("toy-cnn", "A small CNN."),
        ];
        let sources = names
            .iter()
            .map(|(name, about)| Source::new((*name).into(), name.into(), (*about).into()))
            .collect();
        let theme = Theme::new(Name::Dark, Depth::True);
        let (app, effects) = App::new(sources, theme, saved);
        let mut stage = Self { app, effects };
        // The store is empty.
        stage.finish_all();
        let briefs = [
            Ok(brief(11.16, 1.2, "yes")),
            Ok(brief(9032.1, 75.0, "tight")),
            Ok(brief(1076.7, 52.0, "yes")),
            Ok(brief(1300.0, 140.0, "no")),
            Err("hardware".to_owned()),
        ];
        for ((name, _), brief) in names.iter().zip(briefs) {
            let setup = Setup {
                path: name.into(),
                overrides: Vec::new(),
            };
            stage.tell(Message::Surveyed(setup, brief));
        }
        stage.predicted(1076.7);
        stage
    }

    /// Handles an event.
    pub(crate) fn event(&mut self, event: Event) {
        self.effects.extend(update(&mut self.app, event));
    }

    pub(crate) fn tell(&mut self, message: Message) {
        self.event(Event::Message(message));
    }

    /// Answers the newest request with synthetic numbers.
    pub(crate) fn predicted(&mut self, step_ms: f64) {
        let Some(name) = self.app.scenarios.current().map(|s| s.name.clone()) else {
            return;
        };
        let setup = self.app.setup().unwrap();
        let set: Vec<&str> = setup.overrides.iter().map(String::as_str).collect();
        self.tell(Message::Predicted {
            ticket: self.app.scenarios.ticket,
            base: Some(glance(&name, &[], 1076.7)),
            now: Ok(glance(&name, &set, step_ms)),
        });
    }

    /// Reports news of the newest job.
    pub(crate) fn news(&mut self, news: News) {
        let id = *self.app.jobs.keys().next_back().unwrap();
        self.tell(Message::Job(id, news));
    }

    fn finish_all(&mut self) {
        let ids: Vec<_> = self.app.jobs.keys().copied().collect();
        for id in ids {
            self.tell(Message::Job(id, News::Done));
        }
    }

    /// Reports a run as if it had been simulated or trained.
    pub(crate) fn run(&mut self, view: Arc<RunView>) {
        self.news(News::Run(Arc::new(Lanes::new(view))));
        self.news(News::Done);
    }

    /// Types keys: characters as they are, `<name>` for other keys.
    pub(crate) fn keys(&mut self, text: &str) {
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let (code, modifiers, len) =
                match rest.strip_prefix('<').and_then(|r| r.split_once('>')) {
                    Some((name, _)) => {
                        let (code, modifiers) = named(name);
                        (code, modifiers, name.len() + 2)
                    }
                    None => (KeyCode::Char(c), KeyModifiers::NONE, c.len_utf8()),
                };
            rest = &rest[len..];
            self.event(Event::Key(KeyEvent::new(code, modifiers)));
        }
    }

    /// Returns the screen as text.
    pub(crate) fn screen(&mut self, width: u16, height: u16) -> String {
        self.terminal(width, height).backend().to_string()
    }

    pub(crate) fn terminal(&mut self, width: u16, height: u16) -> Terminal<TestBackend> {
        self.event(Event::Resize(width, height));
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(&self.app, frame)).unwrap();
        terminal
    }
}

fn named(name: &str) -> (KeyCode, KeyModifiers) {
    const NONE: KeyModifiers = KeyModifiers::NONE;
    match name {
        "enter" => (KeyCode::Enter, NONE),
        "esc" => (KeyCode::Esc, NONE),
        "tab" => (KeyCode::Tab, NONE),
        "backspace" => (KeyCode::Backspace, NONE),
        "up" => (KeyCode::Up, NONE),
        "down" => (KeyCode::Down, NONE),
        "left" => (KeyCode::Left, NONE),
        "right" => (KeyCode::Right, NONE),
        "ctrl-c" => (KeyCode::Char('c'), KeyModifiers::CONTROL),
        "ctrl-u" => (KeyCode::Char('u'), KeyModifiers::CONTROL),
        other => panic!("no key {other}"),
    }
}
